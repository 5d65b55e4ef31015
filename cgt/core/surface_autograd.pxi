# What Python sees of autograd's graphs: what they saved, where their edges end. A function of one line is that of
# autograd_shim.h, where it is told what it does.

def graphs_freed(list tensors, uint64_t since): return c_graphs_freed(tensors, since)
def graphs_functions(list tensors, uint64_t since): return c_graphs_functions(tensors, since)
def graphs_here(list tensors, int64_t stream): c_graphs_here(tensors, stream)
def graph_heard(object t, int steps): return c_graph_heard(t, steps)
def sinks_new(list tensors): return c_sinks_new(tensors)
def sinks_hooked(object handle, bint parallel): return c_sinks_hooked(handle, parallel)
def sinks_open(object handle, list tensors): c_sinks_open(handle, tensors)
def sinks_flows(object handle, list results, uint64_t since): return c_sinks_flows(handle, results, since)
def sinks_heads(object handle, list results, list joined): c_sinks_heads(handle, results, joined)
def sinks_cut(object handle): c_sinks_cut(handle)
def sinks_join(object handle, int k, object t): c_sinks_join(handle, k, t)
def sinks_here(object handle): c_sinks_here(handle)
def sinks_away(object handle, bint away, bint parallel=False): c_sinks_away(handle, away, parallel)

def sinks_run(object handle, tuple grads):
    """Run the graph with what sinks_heads says (None: not there). It is given aliases, so that whoever
    holds the memory of a gradient can be counted."""
    aliases = [view_like(g, g, 0) if g is not None and is_plain(g) else g for g in grads]
    c_sinks_run(handle, grads, aliases)

def sinks_task(object handle): return c_sinks_task(handle)

def sinks_take(object handle, list which):
    """What a run of the graph left in these sinks: tensors or None."""
    return tuple([sink_take(handle, k) for k in which])

def quiet_gradients(): return c_quiet_gradients()
def histories(list tensors): return c_histories(tensors)
def histories_restore(object handle): c_histories_restore(handle)
