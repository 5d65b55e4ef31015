# What Python sees of autograd's graphs: what they saved, where their edges end (autograd_shim.h).

def graphs_freed(list tensors, uint64_t since):
    """Did a backward free anything that the graphs of these results saved in nodes made since the thread's sequence
    number was `since`?"""
    return c_graphs_freed(tensors, since)

def graphs_functions(list tensors, uint64_t since):
    """Which of those nodes are Python functions."""
    return c_graphs_functions(tensors, since)

def sinks_new(list tensors):
    """Before a graph is made: where gradients of these tensors will end. A handle that owns the ends."""
    return c_sinks_new(tensors)

def sinks_hooked(object handle, bint parallel):
    """Index of a tensor whose gradient's accumulator has a hook; NONE if there is none. `parallel`: but for those of a
    DistributedDataParallel."""
    return c_sinks_hooked(handle, parallel)

def graph_heard(object t, int steps):
    """Has one of the last nodes of autograd's, so many, that made t a hook?"""
    return c_graph_heard(t, steps)

def sinks_open(object handle, list tensors):
    """A graph was made: it ends, among others, at these tensors."""
    c_sinks_open(handle, tensors)

def sinks_flows(object handle, list results, uint64_t since):
    """To which of the tensors (by index) gradients flow in the graph that begins at these results, made since the
    thread's sequence number was `since`: those to which several edges lead, then the rest; or None if it leads
    elsewhere, too."""
    return c_sinks_flows(handle, results, since)

def sinks_heads(object handle, list results, list joined):
    """A run of the graph will be given gradients of these results, in this order; then, for each of these
    tensors (by index), what its own contributions are added to."""
    c_sinks_heads(handle, results, joined)

def sinks_cut(object handle):
    """Cut the graph off from what was before the call: its edges lead to the sinks."""
    c_sinks_cut(handle)

def sinks_join(object handle, int k, object t):
    """Make t, over the memory of the graph's result k, that result."""
    c_sinks_join(handle, k, t)

def sinks_here(object handle):
    """Have the graph run on the current stream."""
    c_sinks_here(handle)

def graphs_here(list tensors, int64_t stream):
    """Have what was left on a stream (by its id) of the graphs behind these tensors run on the current one."""
    c_graphs_here(tensors, stream)

def sinks_away(object handle, bint away, bint parallel=False):
    """Hide the accumulators of the graph's leaves from what is recomputed in it, or show them again. `parallel`: those
    on which a DistributedDataParallel listens run on the current stream from now on."""
    c_sinks_away(handle, away, parallel)

def sinks_run(object handle, tuple grads):
    """Run the graph with what sinks_heads says (None: not there). It is given aliases, so that whoever
    holds the memory of a gradient can be counted."""
    aliases = [view_like(g, g, 0) if g is not None and is_plain(g) else g for g in grads]
    c_sinks_run(handle, grads, aliases)

def sinks_task(object handle):
    """Autograd's number of the graph task that runs the graph now."""
    return c_sinks_task(handle)

def sinks_take(object handle, list which):
    """What a run of the graph left in these sinks: tensors or None."""
    return tuple([sink_take(handle, k) for k in which])

def quiet_gradients():
    """How many gradients replays have left where nobody listens, without a task of autograd's."""
    return c_quiet_gradients()

def histories(list tensors):
    """What these tensors are to autograd now: a handle for histories_restore."""
    return c_histories(tensors)

def histories_restore(object handle):
    """They are it again, whatever was recorded since."""
    c_histories_restore(handle)
