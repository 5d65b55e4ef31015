# What the C++ headers offer, declared once. No code. What is thrown comes to Python as PyTorch's own bindings would
# have it (`raised`).

cdef extern from "debug.h":
    const bint CGT_DEBUG
    const int CGT_TORCH_MAJOR, CGT_TORCH_MINOR

cdef extern from "tensor_shim.h" namespace "cgt" nogil:
    void raised()

cdef extern from "<dlfcn.h>" nogil:
    ctypedef struct Dl_info:
        const char* dli_fname
    int dladdr(void* at, Dl_info* found) noexcept

cdef extern from "watchdog_shim.h" namespace "cgt":
    ctypedef void (*wait_fn)(int device, void* stream) noexcept nogil
    cppclass Watchdog:
        Watchdog(int device, wait_fn wait) except +raised
        void begin(void* stream, double seconds, string text) except +raised
        void note(void* stream) noexcept nogil
        void end() noexcept

cdef extern from "tensor_shim.h" namespace "cgt" nogil:
    uint64_t tensor_keys(PyObject* t)
    int tensor_device(PyObject* t)
    int tensor_ndim(PyObject* t)
    int64_t tensor_itemsize(PyObject* t)
    int64_t tensor_numel(PyObject* t)
    int64_t tensor_span(PyObject* t)
    int PLAIN_TENSOR                # nothing for autograd to know
    int ANY_STATE                   # of a backward's arguments: what they are to autograd plays no part
    int tensor_autograd(PyObject* t)
    char* tensor_ptr "(char*)cgt::tensor_ptr"(PyObject* t)
    void* tensor_storage(PyObject* t)
    void* tensor_impl(PyObject* t)
    int tensor_is_plain(PyObject* t) except +raised
    object dtype_at(int64_t number) except +raised
    bint tensor_is_on(PyObject* t, int device)
    int64_t storage_nbytes(PyObject* t)
    char* tensor_storage_ptr "(char*)cgt::tensor_storage_ptr"(PyObject* t)
    int64_t tensor_offset(PyObject* t)
    void tensor_dims(PyObject* t, int64_t* dims)
    void impl_near(void* impl) noexcept
    void impl_reach(void* impl) noexcept
    uint32_t impl_kind(void* impl) noexcept
    int impl_same(void* impl, uint64_t keys, uint32_t kind, int autograd, int ndim, const int64_t* dims) noexcept
    int impl_has_grad(void* impl) noexcept
    char* impl_at(void* impl, int64_t itemsize) noexcept
    char* tensor_at(PyObject* t, int64_t itemsize) noexcept
    int tensor_overlaps(PyObject* a, PyObject* b) noexcept
    uint64_t tensor_key(PyObject* t, uint64_t h) noexcept
    int tensor_version(PyObject* t)
    void tensor_bump(PyObject* t, int times)
    void* tensor_counter(PyObject* t)
    void* tensor_grad(PyObject* t)
    cppclass Objects:
        Objects()
        void push_back(PyObject* o) except +raised
        void resize(size_t n) except +raised
        PyObject** data()
        size_t size()
    cppclass Tensors "std::vector<at::TensorBase>":
        pass
    void tensor_hold(PyObject* t, Tensors* held)
    PyObject* tensor_grad_tensor(PyObject* t)
    int current_gpu() noexcept
    void ambient_now(uint64_t* words) noexcept
    int ambient_blocker() noexcept
    int saved_hooks() noexcept
    int out_is_held(PyObject* o, int references, int grads) noexcept
    int64_t storage_uses(PyObject* o) noexcept
    int64_t storage_count(void* s) noexcept
    void storage_keep(void* s) noexcept
    int64_t impl_uses(PyObject* o) noexcept
    int cpp_bump
    ctypedef int (*copy_fn)(void* to, const void* source, int64_t nbytes, int device) noexcept

cdef extern from "tensor_shim.h" namespace "cgt":
    object tensor_wrap(PyObject* t) except +raised
    bint tensor_is_lent(PyObject* t) noexcept
    void tensor_set_grad(PyObject* t, PyObject* g)
    void tensor_require_grad(PyObject* t)
    object c_in_inference "cgt::in_inference"(bint on, object body) except +raised
    PyObject* out_make(PyObject* proto, uint64_t keys, int64_t offset, int ndim, const int64_t* dims) except +raised
    PyObject* out_share(PyObject* first, PyObject* proto, uint64_t keys, int64_t offset, int ndim,
                        const int64_t* dims) except +raised
    object out_view(object base, PyObject* proto, uint64_t keys, int64_t shift, int ndim, const int64_t* dims,
                    int made) except +raised
    object tensor_like(object base, object like, int64_t shift) except +raised
    bint tensor_has_attributes(PyObject* o) noexcept nogil
    int tensor_hooks(PyObject* o) noexcept
    void out_unlearn(PyObject* o)
    void out_reset(PyObject* o)
    void out_set_version(PyObject* o, int version)
    void out_share_version(PyObject* o, PyObject* first)
    void storage_drop(void* s) noexcept
    void out_rescue(void* held, int device, copy_fn copy) except +raised
    void out_poison(void* held, const char* message) except +raised
    object tensor_alias(object t) except +raised
    object tensor_fixed(object t) except +raised
    object storage_hold_name(object t) except +raised
    void tensor_disown(PyObject* t) noexcept
    void storage_clear(PyObject* t) noexcept

cdef extern from "tape_shim.h" namespace "cgt":
    void* generator_impl(PyObject* g)
    void* tape_new()
    void* tape_after(void* tape)
    void* rng_keep() except +raised
    void rng_release(void* state, int put_back) noexcept
    void tape_free(void* tape)
    int tape_length(void* tape)
    void tape_fork(void* tape, PyObject* pred, int n, void** bodies) except +raised
    void* tape_outer(void* tape) noexcept
    void tape_pop(void* tape)
    void tape_spend(void* tape, PyObject* proto) noexcept
    int tape_copy(void* tape, PyObject* mine, void* theirs, int64_t nbytes, bint back)
    void tape_plan(void* tape, list made, list outs, list early, const vector[void*]& busy) except +raised
    int64_t blocks_nbytes() noexcept
    void host_give_away(void* held, PyObject* proto) except +raised
    void* range_begin(PyObject* name) noexcept
    void range_end(void* range_) noexcept
    void tape_bind(void* tape, int k) noexcept
    void tape_patch_copy(void* tape, int k, void* theirs) noexcept nogil
    bint tape_add(void* tape, const char* name, const char* overload, object args, object kwargs, object into,
                  const char* out) except +raised
    int tape_last(void* tape) noexcept
    void tape_scalar(void* tape, int op, int arg, int part, int is_float, double f, int64_t i) noexcept nogil
    void tape_state(void* tape, object generator, object state, int sets)
    int tape_run(void* tape, int last) noexcept nogil

cdef extern from "numbers_shim.h" namespace "cgt" nogil:
    const int64_t EXACT
    int form_write(int form, int is_float, double f, int64_t i, char* at) noexcept

cdef extern from "autograd_shim.h" namespace "cgt":
    ctypedef void (*released_fn)(int path, int64_t step) noexcept
    ctypedef PyObject* (*spent_fn)(int node, int path, int64_t step, PyObject** grads, int n,
                                  PyObject* saved) except NULL
    bint c_graphs_freed "cgt::graphs_freed"(list tensors, uint64_t since) except +raised
    object c_graphs_functions "cgt::graphs_functions"(list tensors, uint64_t since) except +raised
    int in_node() noexcept
    int in_backward() noexcept
    cppclass Extents "std::vector<cgt::Extent>":
        pass
    void extent_add(PyObject* t, bint loose, Extents* extents) noexcept nogil
    int extents_apart(Extents* extents) noexcept nogil
    object c_sinks_new "cgt::sinks_new"(list tensors) except +raised
    int c_sinks_hooked "cgt::sinks_hooked"(object handle, int parallel) noexcept
    object c_with_grad "cgt::with_grad"(object body) except +raised
    bint c_graph_heard "cgt::graph_heard"(object t, int steps) except +raised
    void c_sinks_open "cgt::sinks_open"(object handle, list tensors) except +raised
    object c_sinks_flows "cgt::sinks_flows"(object handle, list results, uint64_t since) except +raised
    void c_sinks_heads "cgt::sinks_heads"(object handle, list results, list joined) except +raised
    int c_sinks_run "cgt::sinks_run"(object handle, tuple grads, list aliases) except -1
    void c_sinks_join "cgt::sinks_join"(object handle, int k, object t) except +raised
    void c_sinks_cut "cgt::sinks_cut"(object handle) except +raised
    void c_sinks_away "cgt::sinks_away"(object handle, int away, int parallel) noexcept
    void c_sinks_here "cgt::sinks_here"(object handle) except +raised
    void c_graphs_here "cgt::graphs_here"(list tensors, int64_t stream) except +raised
    int c_sinks_task "cgt::sinks_task"(object handle) noexcept
    object sink_take(object handle, int k) except +raised
    object c_histories "cgt::histories"(list tensors) except +raised
    void c_histories_restore "cgt::histories_restore"(object handle) noexcept
    int64_t c_quiet_gradients "cgt::quiet_gradients"() noexcept
    void* backward_new(PyObject* site, PyObject* saved, PyObject** flows, int n, int joined, int forward,
                       int path, int64_t step, released_fn released, spent_fn spent, PyObject** leaves,
                       int n_leaves, uint64_t reached) except +raised
    void backward_give(void* owner, PyObject* t) except +raised
    void backward_replayed(PyObject* result) noexcept
    void backward_cached(int first) except +raised
    void backward_arm(void* owner) except +raised
    void backward_drop(void* owner) noexcept

cdef extern from "observe_shim.h" namespace "cgt":
    object results_new() except +raised
    object results_alive(object results) except +raised
    void results_forget(object results) noexcept
    PyObject* observer_of_thread() except +raised
    void observer_set(PyObject* pair) except +raised
    void observe_pause(int by) noexcept
    int observe_paused() noexcept
    int observe_key(int on) noexcept
    int observe_shown(int shown) noexcept
    object observe_proceed(object instead) except +raised
    void observe_answer(list results) except +raised
    void observe_done(list results) except +raised
    object observe_before(object body) except +raised
    int observe_lone(object t) noexcept
    void numbers_are_ "cgt::numbers_are"(object node)
    void numbers_watch_ "cgt::numbers_watch"(const void* run, bint on) except +raised
    object observe_numbers() except +raised
    void observe_told() except +raised
    int observe_casts() noexcept
    void observe_list(int k, list tensors) except +raised
    void observe_start() except +raised
    void reads_of(const char* name) except +raised
    void reads_tell(object read, object lift)
    uint64_t reads_enter() except +raised
    void reads_leave(uint64_t handle) except +raised
    int reads_count()
    void* listen_begin_ "cgt::listen_begin"() except +raised
    string listen_end_ "cgt::listen_end"(void* handle) except +raised
    int listen_count()

cdef extern from "cuda_shim.h" namespace "cgt":
    int cuda_current_device() noexcept nogil
    void* cuda_current_stream(int device) noexcept nogil
    bint cuda_stream_lasts(int device) noexcept nogil
    int cuda_see_gpus() noexcept
    void cuda_set_stream(int64_t id, int device) except +raised
    cppclass OnDevice:
        void go(int device) noexcept nogil
    OnDevice on_device(int device) noexcept nogil
    void cuda_thread_ready(int device) noexcept nogil
    ctypedef int (*stream_test)(void* stream) noexcept nogil
    CudaPool* cuda_pool_new(int device, unsigned long long hi, unsigned long long lo) except +raised
    void cuda_pools_drop() noexcept
    void cuda_pool_retire(CudaPool* pool) noexcept
    void cuda_pool_count(CudaPool* pool, int by) noexcept
    int cuda_pool_nodes(CudaPool* pool) noexcept
    void cuda_pool_id(CudaPool* pool, unsigned long long* id) noexcept
    bint cuda_pool_restore(CudaPool* pool, void* state, const vector[void*]& live) except +raised
    void cuda_pool_spend(CudaPool* pool, void* at) except +raised
    bint cuda_pool_checkpoint(CudaPool* pool, const vector[void*]& made, void** state) except +raised
    bint cuda_pool_made(CudaPool* pool, void* at) except +raised
    object cuda_pool_free(CudaPool* pool, void* stream) except +raised
    int64_t cuda_dropout_now(int device) noexcept
    void cuda_dropout_undo(int device) noexcept
    void cuda_dropout_watch() except +raised
    object cuda_allocations(int device) except +raised
    void cuda_state_free(void* state) noexcept
    void cuda_pool_begin(CudaPool* pool, void* stream, stream_test capturing) except +raised
    void cuda_pool_end(CudaPool* pool) noexcept
    void cuda_mark(int device, int begin) noexcept
    void* generator_swap(object generator, object seed_word, object offset_word,
                         unsigned long long capture_id) except +raised
    uint64_t generator_restore(void* handle, int* drew) noexcept
    uint64_t generator_moved(void* handle) noexcept
    void generator_point(void* handle, object seed_word, object offset_word, uint64_t moved) noexcept
    void generator_follow(void* handle, unsigned long long capture_id) noexcept
    void generator_give_back(PyObject* generator, uint64_t advance, uint64_t seed, uint64_t offset) noexcept
    void generator_take(PyObject* generator, uint64_t advance, uint64_t* seed, uint64_t* offset) except +raised

cdef extern from "calls_shim.h" namespace "cgt":
    void* method_of(object function)
    uint64_t call_tap_begin(object methods, object started, object called, object others, object aside) except +raised
    void call_tap_end(uint64_t handle)
    int call_tap_count()

cdef extern from "dict_shim.h" namespace "cgt":
    PyObject* type_lookup(PyObject* tp, PyObject* name)
    int dict_watch_start()
    int dict_watch(PyObject* d)
    void dict_guard(PyObject* d, PyObject* key)
    uint64_t dict_epoch
    int function_part(PyObject* home, PyObject* key)
    PyObject* function_get(PyObject* function, int part) noexcept nogil
    uint64_t dict_tag(PyObject* d) noexcept nogil

cdef extern from "Python.h":
    PyObject* PyWeakref_GetObject(PyObject* ref)
    PyObject* Py_TYPE_ "(PyObject*)Py_TYPE"(PyObject* o) nogil
    PyObject* PyDict_GetItemWithError(PyObject* d, PyObject* key) except? NULL
    int PyDict_Next(PyObject* d, Py_ssize_t* at, PyObject** key, PyObject** value)
    Py_ssize_t PyDict_GET_SIZE(PyObject* d)
    PyObject* PyCell_GET(PyObject* cell)
    int PyCell_Check(PyObject* o)
    int PyCell_Set(PyObject* cell, PyObject* value) except -1
    int PyList_CheckExact(PyObject* o)
    int PyDict_CheckExact(PyObject* o)
    Py_ssize_t Py_REFCNT(PyObject* o)
    PyObject* PyObject_GetAttrX "PyObject_GetAttr"(PyObject* o, PyObject* name)
    int PyObject_RichCompareBoolX "PyObject_RichCompareBool"(PyObject* a, PyObject* b, int op)
    PyObject* PyErr_Occurred()
    void PyErr_Clear()
    int PyGC_Disable() noexcept
    int PyGC_Enable() noexcept
    void Py_XDECREFX "Py_XDECREF"(PyObject* o)
    void Py_DECREFX "Py_DECREF"(PyObject* o)
    void Py_INCREFX "Py_INCREF"(PyObject* o)
    void Py_XINCREFX "Py_XINCREF"(PyObject* o)
    Py_ssize_t PyList_GET_SIZEX "PyList_GET_SIZE"(PyObject* o)
    PyObject* PyList_GET_ITEMX "PyList_GET_ITEM"(PyObject* o, Py_ssize_t i)
    Py_ssize_t PyTuple_GET_SIZEX "PyTuple_GET_SIZE"(PyObject* o)
    PyObject* PyTuple_GET_ITEMX "PyTuple_GET_ITEM"(PyObject* o, Py_ssize_t i)
    PyObject* TRUE "Py_True"
    PyObject* FLOAT_TYPE "(PyObject*)&PyFloat_Type"
    int64_t PyLong_AsLongLongAndOverflow(PyObject* o, int* overflow)
    PyObject* INT_TYPE "(PyObject*)&PyLong_Type"
    PyObject* STR_TYPE "(PyObject*)&PyUnicode_Type"
    PyObject* BYTES_TYPE "(PyObject*)&PyBytes_Type"
    PyObject* BOOL_TYPE "(PyObject*)&PyBool_Type"
    PyObject* TUPLE_TYPE "(PyObject*)&PyTuple_Type"
    PyObject* LIST_TYPE "(PyObject*)&PyList_Type"
    PyObject* DICT_TYPE "(PyObject*)&PyDict_Type"
    double PyFloat_AS_DOUBLE(PyObject* o)
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from "<vector>" namespace "std" nogil:
    size_t erase(vector[void*]& of, void* what)

cdef extern from "<mutex>" namespace "std" nogil:
    cppclass mutex:
        bint try_lock()
        void lock()
        void unlock()
