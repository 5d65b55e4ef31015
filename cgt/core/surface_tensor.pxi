# What Python asks of tensors and their memory. A function of one line is one of tensor_shim.h, where it is told what it
# does; addresses of what C++ has are numbers.

def set_version(object t, int version): out_set_version(<PyObject*>t, version)
def alias(object t): return tensor_alias(t)
def fixed(object t): return tensor_fixed(t)
def view_like(object base, object like, int64_t shift): return tensor_like(base, like, shift)
def dtype_of(int64_t number): return dtype_at(number)
def is_plain(object t): return tensor_is_plain(<PyObject*>t) != 0
def is_lent(object t): return tensor_is_lent(<PyObject*>t)
def address(object t): return <uintptr_t>tensor_ptr(<PyObject*>t)
def version_of(object t): return tensor_version(<PyObject*>t)
def version_counter(object t): return <uintptr_t>tensor_counter(<PyObject*>t)
def span(object t): return tensor_span(<PyObject*>t)
def has_attributes(object t): return tensor_has_attributes(<PyObject*>t)
def grad_id(object t): return <uintptr_t>tensor_grad(<PyObject*>t)
def generator_id(object g): return <uintptr_t>generator_impl(<PyObject*>g)
def storage_id(object t): return <uintptr_t>tensor_storage(<PyObject*>t)
def storage_bytes(object t): return storage_nbytes(<PyObject*>t)
def storage_address(object t): return <uintptr_t>tensor_storage_ptr(<PyObject*>t)
def storage_holders(object t): return storage_uses(<PyObject*>t)
def storage_name(object t): return storage_hold_name(t)
def storage_empty(object t): storage_clear(<PyObject*>t)

def mirrored(object t):
    """What the core takes a tensor for: (sizes, strides, offset, elements, device, does it require grad, hooks).
    private.py holds it against what PyTorch says."""
    cdef int64_t dims[SCRATCH]
    cdef int k, ndim = tensor_ndim(<PyObject*>t)
    if 2 * ndim > SCRATCH: return None
    tensor_dims(<PyObject*>t, dims)
    return (
        tuple([dims[k] for k in range(ndim)]), tuple([dims[ndim + k] for k in range(ndim)]),
        tensor_offset(<PyObject*>t), tensor_numel(<PyObject*>t), tensor_device(<PyObject*>t),
        tensor_autograd(<PyObject*>t) != PLAIN_TENSOR, tensor_hooks(<PyObject*>t))

def reference_counts(object t):
    """(Python references beside the caller's own, TensorImpl uses, storage uses); for calibration."""
    return sys.getrefcount(t), impl_uses(<PyObject*>t), storage_uses(<PyObject*>t)

def references(object t):
    """Python references to a tensor, without what C++ adds by holding it; to compare with later."""
    return sys.getrefcount(t) - (cpp_bump if impl_uses(<PyObject*>t) > 1 else 0)

def set_cpp_bump(int bump):
    """By how much a Python reference count rises while C++ holds the tensor too; see private.py."""
    global cpp_bump
    cpp_bump = bump

def reuse_outputs(bint on):
    """May the same tensors be handed out again? Off where reference counts are not understood."""
    global REUSE_OUTPUTS
    REUSE_OUTPUTS = on
