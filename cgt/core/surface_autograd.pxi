# What Python sees of autograd's graphs: what they saved, where their edges end (autograd_shim.h).


def graphs_freed(list tensors, uint64_t since):
    """Did a backward free anything that the graphs of these results saved in nodes made since the thread's sequence
    number was `since`?"""
    found = c_graphs_freed(<PyObject*>tensors, since)
    if found < 0: raise_pending()
    return found == 1


def graphs_functions(list tensors, uint64_t since):
    """Which of those nodes are Python functions."""
    return taken(c_graphs_functions(<PyObject*>tensors, since))


def sinks_new(list tensors):
    """Before a graph is made: where gradients of these tensors will end. A handle that owns the ends."""
    return taken(c_sinks_new(<PyObject*>tensors))


def sinks_hooked(object handle, bint parallel):
    """Index of a tensor whose gradient's accumulator has a hook; NONE if there is none. `parallel`: but for those of a
    DistributedDataParallel."""
    return c_sinks_hooked(<PyObject*>handle, parallel)


def graph_heard(object t, int steps):
    """Has one of the last nodes of autograd's, so many, that made t a hook?"""
    return c_graph_heard(<PyObject*>t, steps) == 1


def sinks_open(object handle, list tensors):
    """A graph was made: it ends, among others, at these tensors."""
    if c_sinks_open(<PyObject*>handle, <PyObject*>tensors) != 0: raise_pending()


def sinks_flows(object handle, list results, uint64_t since):
    """To which of the tensors (by index) gradients flow in the graph that begins at these results, made since the
    thread's sequence number was `since`: those to which several edges lead, then the rest; or None if it leads
    elsewhere, too."""
    return taken(c_sinks_flows(<PyObject*>handle, <PyObject*>results, since))


def sinks_heads(object handle, list results, list joined):
    """A run of the graph will be given gradients of these results, in this order; then, for each of these
    tensors (by index), what its own contributions are added to."""
    if c_sinks_heads(<PyObject*>handle, <PyObject*>results, <PyObject*>joined) != 0: raise_pending()


def sinks_cut(object handle):
    """Cut the graph off from what was before the call: its edges lead to the sinks."""
    if c_sinks_cut(<PyObject*>handle) != 0: raise_pending()


def sinks_join(object handle, int k, object t):
    """Make t, over the memory of the graph's result k, that result."""
    if c_sinks_join(<PyObject*>handle, k, <PyObject*>t) != 0: raise_pending()


def sinks_here(object handle):
    """Have the graph run on the current stream."""
    if c_sinks_here(<PyObject*>handle) != 0: raise_pending()


def graphs_here(list tensors, int64_t stream):
    """Have what was left on a stream (by its id) of the graphs behind these tensors run on the current one."""
    if c_graphs_here(<PyObject*>tensors, stream) != 0: raise_pending()


def sinks_away(object handle, bint away, bint parallel=False):
    """Hide the accumulators of the graph's leaves from what is recomputed in it, or show them again. `parallel`: those
    on which a DistributedDataParallel listens run on the current stream from now on."""
    c_sinks_away(<PyObject*>handle, away, parallel)


def sinks_run(object handle, tuple grads):
    """Run the graph with what sinks_heads says (None: not there). It is given aliases, so that whoever
    holds the memory of a gradient can be counted."""
    aliases = [view_like(g, g, 0) if g is not None and is_plain(g) else g for g in grads]
    if c_sinks_run(<PyObject*>handle, <PyObject*>grads, <PyObject*>aliases) != 0: raise_pending()


def sinks_task(object handle):
    """Autograd's number of the graph task that runs the graph now."""
    return c_sinks_task(<PyObject*>handle)


def sinks_take(object handle, list which):
    """What a run of the graph left in these sinks: tensors or None."""
    return tuple([taken(sink_take(<PyObject*>handle, k)) for k in which])


def quiet_gradients():
    """How many gradients replays have left where nobody listens, without a task of autograd's."""
    return c_quiet_gradients()


def histories(list tensors):
    """What these tensors are to autograd now: a handle for histories_restore."""
    return taken(c_histories(<PyObject*>tensors))


def histories_restore(object handle):
    """They are it again, whatever was recorded since."""
    c_histories_restore(<PyObject*>handle)
