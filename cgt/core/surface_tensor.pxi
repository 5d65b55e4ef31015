# What Python asks of tensors and their memory.

def set_version(object t, int version):
    """What `_version` of a tensor is from now on: kernels of foreach ops count, too, where they are captured in
    vain."""
    out_set_version(<PyObject*>t, version)

def alias(object t):
    """A detached tensor over the same storage with the same metadata."""
    return tensor_alias(t)

def fixed(object t):
    """A flat tensor over t's storage at today's address that owns nothing."""
    return tensor_fixed(t)

def view_like(object base, object like, int64_t shift):
    """A tensor with the metadata of `like` over base's memory, `shift` bytes from base's start."""
    return tensor_like(base, like, shift)

def dtype_of(int64_t number):
    """The dtype that an op's argument tells by its number."""
    return dtype_at(number)

def is_plain(object t):
    """Can a recording hold such a tensor: strided, not quantized, not nested, not a wrapper of others?"""
    return tensor_is_plain(<PyObject*>t) != 0

def is_lent(object t):
    """Does a recording write t's memory at its next replay, if nobody holds t?"""
    return tensor_is_lent(<PyObject*>t)

def address(object t):
    """t.data_ptr(), without the checks."""
    return <uintptr_t>tensor_ptr(<PyObject*>t)

def version_counter(object t):
    """Identity of what counts t's versions, which it may share; 0 of an inference tensor."""
    return <uintptr_t>tensor_counter(<PyObject*>t)

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

def has_attributes(object t):
    """Did somebody leave Python attributes on a tensor?"""
    return tensor_has_attributes(<PyObject*>t)

def grad_id(object t):
    """Identity of t.grad's TensorImpl, or 0."""
    return <uintptr_t>tensor_grad(<PyObject*>t)

def generator_id(object g):
    """Identity of a torch.Generator, which can have several Python objects."""
    return <uintptr_t>generator_impl(<PyObject*>g)

def storage_id(object t):
    """Identity of a tensor's storage (0 without one). Makes no Python storage object."""
    return <uintptr_t>tensor_storage(<PyObject*>t)

def storage_bytes(object t):
    """Bytes of the memory that a tensor looks at part of."""
    return storage_nbytes(<PyObject*>t)

def storage_address(object t):
    """Where a tensor's storage begins."""
    return <uintptr_t>tensor_storage_ptr(<PyObject*>t)

def storage_holders(object t):
    """How many hold the memory of t: tensors, and whoever counts storages."""
    return storage_uses(<PyObject*>t)

def storage_name(object t):
    """Something without which t's storage_id may become another's; it holds none of the memory."""
    return storage_hold_name(t)

def storage_empty(object t):
    """Give the memory of t back to its allocator, whoever still has a tensor over it."""
    storage_clear(<PyObject*>t)

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
