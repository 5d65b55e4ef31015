# What Python sees of autograd's graphs: what they saved, where their edges end (autograd_shim.h).


def saved_behind(list tensors, uint64_t since):
    """What the graphs of these results saved in nodes made since the thread's sequence number was `since`:
    SavedTensors, good for as long as the graphs."""
    return taken(graphs_saved(<PyObject*>tensors, since))


def functions_behind(list tensors, uint64_t since):
    """Which of those nodes are Python functions."""
    return taken(graphs_functions(<PyObject*>tensors, since))


def sinks(list tensors):
    """Before a graph is made: where gradients of these tensors will end. A handle that owns the ends."""
    return taken(sinks_new(<PyObject*>tensors))


def sinks_hooked(object handle):
    """Index of a tensor whose gradient's accumulator has a hook; NONE if there is none."""
    return sinks_hook(<PyObject*>handle)


def sinks_begin(object handle, list tensors, list results):
    """A graph was made: it begins at these results and ends, among others, at these tensors."""
    if sinks_open(<PyObject*>handle, <PyObject*>tensors, <PyObject*>results) != 0: raise_pending()


def sinks_flows(object handle, uint64_t since):
    """To which of the tensors (by index) gradients flow in that graph, made since the thread's sequence
    number was `since`: those to which several edges lead, then the rest; or None if it leads elsewhere, too."""
    return taken(sinks_find(<PyObject*>handle, since))


def sinks_grads(object handle, list results, list joined):
    """A run of the graph will be given gradients of these results, in this order; then, for each of these
    tensors (by index), what its own contributions are added to."""
    if sinks_heads(<PyObject*>handle, <PyObject*>results, <PyObject*>joined) != 0: raise_pending()


def sinks_lead(object handle):
    """Cut the graph off from what was before the call: its edges lead to the sinks."""
    if sinks_cut(<PyObject*>handle) != 0: raise_pending()


def sinks_result(object handle, int k, object t):
    """Make t, over the memory of the graph's result k, that result."""
    if sinks_join(<PyObject*>handle, k, <PyObject*>t) != 0: raise_pending()


def sinks_here(object handle):
    """Have the graph run on the current stream."""
    if sinks_stamp(<PyObject*>handle) != 0: raise_pending()


def graphs_here(list tensors, int64_t stream):
    """Have what was left on a stream (by its id) of the graphs behind these tensors run on the current one."""
    if graphs_stamp(<PyObject*>tensors, stream) != 0: raise_pending()


def sinks_away(object handle, bint away):
    """Hide the accumulators of the graph's leaves from what is recomputed in it, or show them again."""
    sinks_part(<PyObject*>handle, away)


def sinks_backward(object handle, tuple grads):
    """Run the graph with what sinks_grads says (None: not there). It is given aliases, so that whoever
    holds the memory of a gradient can be counted."""
    aliases = [g if g is None else view_like(g, g, 0) for g in grads]
    if sinks_run(<PyObject*>handle, <PyObject*>grads, <PyObject*>aliases) != 0: raise_pending()


def sinks_task(object handle):
    """Autograd's number of the graph task that runs the graph now."""
    return sinks_now(<PyObject*>handle)


def sinks_take(object handle, list which):
    """What a run of the graph left in these sinks: tensors or None."""
    return tuple([taken(sink_take(<PyObject*>handle, k)) for k in which])


def quiet_gradients():
    """How many gradients replays have left where nobody listens, without a task of autograd's."""
    return quiet_given()


def histories(list tensors):
    """What these tensors are to autograd now: a handle for histories_restore."""
    return taken(histories_new(<PyObject*>tensors))


def histories_restore(object handle):
    """They are it again, whatever was recorded since."""
    histories_back(<PyObject*>handle)
