// PyTorch's autograd as the core sees it: the node that stands for a replayed forward, and the cut
// that turns the graph of a recorded one into something that can run on its own.
#pragma once
#include "tape_shim.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <typeindex>

namespace cgt {

namespace ag = torch::autograd;
using NodePtr = decltype(ag::Edge::function);

// Long chains of nodes are freed without recursion.
template <class T>
static NodePtr node_ptr(T* node) {
#if CGT_TORCH_MINOR >= 13
  return NodePtr(c10::intrusive_ptr<T>::unsafe_steal_from_new(node));
#else
  return NodePtr(node, ag::deleteNode);
#endif
}

#if CGT_TORCH_MINOR >= 13
using WeakNode = c10::weak_intrusive_ptr<ag::Node>;
#else
using WeakNode = std::weak_ptr<ag::Node>;
#endif

static const at::Tensor& tensor_of(PyObject* t) {
  return reinterpret_cast<const at::Tensor&>(reinterpret_cast<PyTensor*>(t)->cdata);
}

// Where a tensor lies; `loose`: and that it shares bytes with others would tell.
struct Extent {
  const char *lo, *hi;
  bool loose;
};
static inline void extent_add(PyObject* t, bool loose, std::vector<Extent>* extents) noexcept {
  if (!tensor_is_plain(t) || impl_numel(impl_of(t)) == 0) return;
  const char* lo = tensor_at(t, static_cast<int64_t>(impl_of(t)->itemsize()));
  extents->push_back({lo, lo + tensor_span(t), loose});
}
static inline int extents_apart(std::vector<Extent>* extents) noexcept {
  std::sort(extents->begin(), extents->end(), [](const Extent& a, const Extent& b) { return a.lo < b.lo; });
  const char *end = nullptr, *loose = nullptr;  // of all so far; of those that are loose
  for (const Extent& x : *extents) {
    if (x.lo < (x.loose ? end : loose)) return 0;
    end = std::max(end, x.hi);
    if (x.loose) loose = std::max(loose, x.hi);
  }
  return 1;
}

struct Gil {
  PyGILState_STATE state = PyGILState_Ensure();
  ~Gil() { PyGILState_Release(state); }
};

// Where gradients of these tensors go; no edge for what is undefined. Ours, so that nobody else can take
// them away meanwhile.
// The GIL is the outermost lock. PyTorch looks an accumulator up, or makes it, under a mutex of the tensor's, and may
// need the GIL for it there (to count a Python object's references): who holds the GIL must not wait for that mutex.
static ag::edge_list edges_of(const std::vector<at::Tensor>& tensors) {
  ag::edge_list edges(tensors.size());
  py::gil_scoped_release no_gil;
  for (size_t k = 0; k < tensors.size(); ++k)
    if (tensors[k].defined()) edges[k] = ag::impl::gradient_edge(tensors[k]);
  return edges;
}

static std::vector<at::Tensor> tensors_of(PyObject* list) {
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(list); ++k) tensors.push_back(tensor_of(PyList_GET_ITEM(list, k)));
  return tensors;
}

// --- graphs of the user's ------------------------------------------------------------------------
// They are walked here and not in Python, which would make an object for each node. Such an object may live as
// long as the node, and a graph of nodes that have one is freed recursively: 50,000 ops overflow the stack.

// The nodes behind these edges, along those of which `leads` says so. What comes first in the graph comes first.
template <class Leads>
static std::vector<NodePtr> nodes_behind(ag::edge_list roots, Leads&& leads) {
  std::vector<NodePtr> nodes, todo;
  std::unordered_set<ag::Node*> seen;
  auto meet = [&](ag::edge_list& edges) {
    for (ag::Edge& edge : edges)
      if (edge.is_valid() && leads(edge) && seen.insert(edge.function.get()).second) todo.push_back(edge.function);
  };
  meet(roots);
  while (!todo.empty()) {
    nodes.push_back(std::move(todo.back()));
    todo.pop_back();
    meet(nodes.back()->next_edges());
  }
  return nodes;
}

// Does the edge lead to a node that was made since the thread's sequence number was `since`, and is no accumulator?
static bool is_since(const ag::Edge& edge, uint64_t since) {
  return edge.function->sequence_nr() >= since && edge.function->sequence_nr() != UINT64_MAX;
}
static std::vector<NodePtr> nodes_since(PyObject* tensors, uint64_t since) {
  return nodes_behind(edges_of(tensors_of(tensors)), [&](const ag::Edge& edge) { return is_since(edge, since); });
}

// What gives the SavedTensors of one type of nodes: an object of its Python type, lent to one node after the
// other, and the type's attributes for them. NULL: its nodes are functions written in Python, and have objects.
struct Window {
  PyObject* object;
  std::vector<PyGetSetDef*> saved;
};

static const Window& window_of(const NodePtr& node) {
  static auto* windows = new std::unordered_map<std::type_index, Window>();
  auto found = windows->find(typeid(*node));
  if (found != windows->end()) return found->second;
  py::object real = owned(ag::functionToPyObject(node));   // PyTorch knows the type by a node only
  PyTypeObject* type = Py_TYPE(real.ptr());
  Window window{nullptr, {}};
  if (!PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) {
    window.object = owned(type->tp_alloc(type, 0)).release().ptr();
    PyObject_GC_UnTrack(window.object);
    new (&reinterpret_cast<ag::THPCppFunction*>(window.object)->cdata) NodePtr();
    for (PyGetSetDef* one = type->tp_getset; one && one->name; ++one)
      if (strncmp(one->name, "_raw_saved_", 11) == 0) window.saved.push_back(one);
  }
  return windows->emplace(typeid(*node), window).first->second;
}

// Append a SavedTensor, or each of a tuple of them, to a list.
static void saved_add(py::list& list, const py::object& one) {
  if (!py::isinstance<py::tuple>(one)) return list.append(one);
  for (py::handle part : one) list.append(part);
}

// The SavedTensors of these nodes: good for as long as the nodes.
static py::list saved_of(const std::vector<NodePtr>& nodes) {
  py::list list;
  for (const NodePtr& node : nodes) {
    const Window& window = window_of(node);
    if (!window.object) {
      saved_add(list, owned(ag::functionToPyObject(node)).attr("_raw_saved_tensors"));
      continue;
    }
    NodePtr& lent = reinterpret_cast<ag::THPCppFunction*>(window.object)->cdata;
    for (PyGetSetDef* one : window.saved) {
      NodePtr before = std::exchange(lent, node);   // a finalizer may have come to look, too
      PyObject* saved = one->get(window.object, one->closure);
      lent = std::move(before);
      saved_add(list, owned(saved));
    }
  }
  return list;
}

REACH(SavedGradFn, &ag::SavedVariable::grad_fn_);
REACH(SavedNone, &ag::SavedVariable::was_default_constructed_);

// Did a backward free anything that the graphs behind these tensors saved, as far as they were made since `since`?
static bool graphs_freed(PyObject* tensors, uint64_t since) {
  py::list saved = saved_of(nodes_since(tensors, since));
  return std::any_of(saved.begin(), saved.end(), [](py::handle handle) {
    auto* one = handle.cast<ag::SavedVariable*>();
    return !one->has_hooks() && !one->get_raw_data()->defined() && !(one->*reach(SavedNone()));
  });
}

// The nodes in them that are Python functions: a list.
static PyObject* graphs_functions(PyObject* tensors, uint64_t since) {
  py::list list;
  for (const NodePtr& node : nodes_since(tensors, since))
    if (!window_of(node).object) list.append(owned(ag::functionToPyObject(node)));
  return list.release().ptr();
}

// Does autograd evaluate a node in this thread?
static inline int in_node() noexcept { return ag::get_current_node() != nullptr; }

// --- the recorded graph ------------------------------------------------------------------------
// Its edges to the tensors that came from outside are replaced by edges to sinks, so that running it
// touches no gradient of the user's, and holds nothing of what was before the call.

struct Sink : ag::Node {
  at::Tensor got;
  ag::variable_list apply(ag::variable_list&& grads) override {
    got = std::move(grads[0]);
    return {};
  }
  std::string name() const override { return "CgtSink"; }
};

// Where a run begins. It hands the gradients over, so that each is let go of by its last reader: the
// engine keeps what it is given itself to the end.
struct Begin : ag::Node {
  ag::variable_list grads;
  int* task = nullptr;
  ag::variable_list apply(ag::variable_list&&) override {
    *task = ag::get_current_graph_task_id();
    return std::move(grads);
  }
  std::string name() const override { return "CgtBegin"; }
};

static constexpr int NO_TASK = -2;  // -1 is autograd's own word for "outside"

struct Sinks {
  std::vector<NodePtr> nodes;    // one per tensor; NULL where no gradient can flow
  std::vector<ag::Edge> ends;    // the edge that leads to each tensor; after the cut those of leaves,
                                 // whose accumulators a saved leaf asks for when it is unpacked
  std::vector<ag::Edge> roots;   // where the graph begins; until the cut
  std::vector<ag::Edge> heads;   // those to which a call's gradients come, in its order
  std::vector<NodePtr> graph;    // all of it; since the cut
  // What a run was given, by the aliases that it got: a gradient that passes through unchanged is the very
  // tensor, as in eager, and AccumulateGrad sees that others hold it. Weak: an alias dies with its last
  // reader, and its address is not used again meanwhile. The tensors are borrowed until the run is over.
  std::vector<std::pair<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>, PyObject*>> given;
  uint64_t since = 0;            // sequence number of its first node, or a lower one
  int task = NO_TASK;            // autograd's number of the run under way
};

// Before the run: the leaves among these tensors get their accumulators on the caller's stream, on which
// a replayed backward will run.
static PyObject* sinks_new(PyObject* tensors) {
  std::vector<at::Tensor> leaves = tensors_of(tensors);
  for (at::Tensor& t : leaves)
    if (!t.requires_grad() || !t.is_leaf()) t.reset();
  Sinks sinks;
  sinks.nodes.resize(leaves.size());
  sinks.ends = edges_of(leaves);
  return handle_new(std::move(sinks));
}

// Are all hooks on this accumulator a DistributedDataParallel's, which are lambdas of C++?
static bool is_reduced(ag::AccumulateGrad* leaf) {
  for (const auto& hook : leaf->post_hooks())
    if (!dynamic_cast<ag::utils::LambdaPostHook*>(hook.get())) return false;
  return leaf->pre_hooks().empty() && !leaf->post_hooks().empty();
}

// The first of these tensors on whose accumulator somebody put a hook, or -1; `parallel`: but for is_reduced. (Those
// on the tensor itself follow it to any accumulator.)
static int sinks_hooked(PyObject* capsule, int parallel) noexcept {
  const std::vector<ag::Edge>& ends = inside<Sinks>(capsule).ends;
  for (size_t k = 0; k < ends.size(); ++k) {
    auto* leaf = dynamic_cast<ag::AccumulateGrad*>(ends[k].function.get());
    if (!leaf || (leaf->pre_hooks().empty() && leaf->post_hooks().empty())) continue;
    if (!(parallel && is_reduced(leaf))) return static_cast<int>(k);
  }
  return -1;
}

// After it: a sink for each tensor that requires grad.
static void sinks_open(PyObject* capsule, PyObject* tensors) {
  Sinks& sinks = inside<Sinks>(capsule);
  std::vector<at::Tensor> flows = tensors_of(tensors);
  for (size_t k = 0; k < flows.size(); ++k) {
    if (flows[k].requires_grad()) {
      sinks.nodes[k] = node_ptr(new Sink());
      sinks.nodes[k]->add_input_metadata(flows[k]);
    } else {
      flows[k].reset();
    }
  }
  ag::edge_list ends = edges_of(flows);
  for (size_t k = 0; k < flows.size(); ++k)
    if (ends[k].function) sinks.ends[k] = std::move(ends[k]);
}

// Walk the graph from its roots. In `reached`, per tensor, how many edges lead to it; false if one leads to
// anything else that was there before the graph.
static bool sinks_walk(Sinks& sinks, bool cut, std::vector<int>* reached) {
  std::map<std::pair<ag::Node*, uint32_t>, size_t> ends;
  for (size_t k = 0; k < sinks.ends.size(); ++k)
    if (sinks.nodes[k]) ends[{sinks.ends[k].function.get(), sinks.ends[k].input_nr}] = k;
  auto is_mine = [&](const ag::Edge& edge) { return is_since(edge, sinks.since); };
  bool all = std::all_of(sinks.roots.begin(), sinks.roots.end(), is_mine);
  sinks.graph = nodes_behind(sinks.roots, [&](ag::Edge& edge) {
    auto end = ends.find({edge.function.get(), edge.input_nr});
    if (end == ends.end()) return is_mine(edge) || (all = false);
    ++(*reached)[end->second];
    if (cut) edge = ag::Edge(sinks.nodes[end->second], 0);
    return false;
  });
  return all;
}

// Does anybody hear of what comes to this accumulator, but for the gradient that it makes of it? Hooks of the
// tensor follow it to any accumulator, those of the node are put there by DistributedDataParallel and FSDP.
static bool is_heard(ag::AccumulateGrad* leaf) {
  const ag::AutogradMeta* m = autograd_meta_of(leaf->variable.unsafeGetTensorImpl());
  return !m || !m->hooks_.empty() || m->post_acc_grad_hooks_ || !leaf->pre_hooks().empty() ||
         !leaf->post_hooks().empty() || !leaf->retains_grad_hooks().empty();
}

// The graph begins at `results`.
// The tensors (by index) to which gradients flow: a tuple of two lists, first those to which several edges
// lead. None if the graph leads to others, too. In each list those where nobody listens come last: a call's
// node leaves the gradients before them to the engine.
static PyObject* sinks_flows(PyObject* capsule, PyObject* results, uint64_t since) {
  Sinks& sinks = inside<Sinks>(capsule);
  sinks.roots = edges_of(tensors_of(results));
  sinks.since = since;
  std::vector<int> reached(sinks.nodes.size(), 0);
  if (!sinks_walk(sinks, false, &reached)) Py_RETURN_NONE;
  std::vector<size_t> order;
  for (size_t k = 0; k < reached.size(); ++k)
    if (reached[k]) order.push_back(k);
  std::stable_partition(order.begin(), order.end(), [&](size_t k) {
    auto* leaf = dynamic_cast<ag::AccumulateGrad*>(sinks.ends[k].function.get());
    return !leaf || is_heard(leaf);
  });
  py::list joined, single;
  for (size_t k : order) (reached[k] == 1 ? single : joined).append(k);
  return py::make_tuple(joined, single).release().ptr();
}

// body() where autograd makes a graph.
static PyObject* with_grad(PyObject* body) {
  c10::AutoGradMode on(true);
  return called(body);
}

// Does somebody hear of gradients on their way through the last `steps` nodes that made t?
static bool graph_heard(PyObject* t, int steps) {
  NodePtr node = ag::impl::gradient_edge(tensor_of(t)).function;
  for (; node && steps > 0; --steps) {
    if (!node->pre_hooks().empty() || !node->post_hooks().empty() || !node->tensor_pre_hooks().empty() ||
        !node->retains_grad_hooks().empty())
      return true;
    node = NodePtr(node->next_edge(0).function);
  }
  return false;
}

// Gradients will be those of these results; then what comes to these sinks before anything else.
static void sinks_heads(PyObject* capsule, PyObject* results, PyObject* joined) {
  Sinks& sinks = inside<Sinks>(capsule);
  sinks.heads = edges_of(tensors_of(results));
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(joined); ++k)
    sinks.heads.emplace_back(sinks.nodes[PyLong_AsSize_t(PyList_GET_ITEM(joined, k))], 0);
}

// t, which has the memory of the graph's result k, is that result.
static void sinks_join(PyObject* capsule, int k, PyObject* t) {
  ag::impl::set_gradient_edge(tensor_of(t), inside<Sinks>(capsule).roots[k]);
}

// Lead the graph's edges to the sinks. From then on it knows nothing of what was before the call: what a node
// saved of an argument knows where that came from (it would need it to be differentiated again), too.
static void sinks_cut(PyObject* capsule) {
  Sinks& sinks = inside<Sinks>(capsule);
  std::vector<int> reached(sinks.nodes.size(), 0);
  sinks_walk(sinks, true, &reached);
  for (const NodePtr& node : sinks.graph)      // an op in place on a view: its own node leads where the one around does
    if (auto* slices = dynamic_cast<ag::CopySlices*>(node.get()))
      for (uint32_t k = 1; k < slices->num_outputs(); ++k) slices->fn->next_edges()[k] = slices->next_edge(k);
  for (ag::Edge& end : sinks.ends)
    if (end.function && end.function->sequence_nr() != UINT64_MAX) end = ag::Edge();
  sinks.roots.clear();
  for (py::handle saved : saved_of(sinks.graph)) {
    NodePtr& from = saved.cast<ag::SavedVariable*>()->*reach(SavedGradFn());
    if (from && from->sequence_nr() < sinks.since) from = node_ptr(new Sink());
  }
}

// The engine runs a node on the stream that was current when the node learnt of its inputs: let that be today's.
static void stamp(const NodePtr& node) {
  std::vector<ag::InputMetadata> inputs;
  for (uint32_t k = 0; k < node->num_inputs(); ++k) {
    inputs.push_back(node->input_metadata(k));
    if (inputs.back().is_nested_tensor()) return;
  }
  node->clear_input_metadata();
  for (const ag::InputMetadata& m : inputs) {
    if (m.was_default_constructed()) {
      node->add_input_metadata(ag::Node::undefined_input());
    } else {
      node->add_input_metadata(m.options(), m.shape_as_dim_vector(), m.is_tensor_subclass(), false, m.grad_dtype());
    }
  }
}

// All of a recorded graph: the stream that recorded it may be capturing for another thread.
static void sinks_here(PyObject* capsule) {
  Sinks& sinks = inside<Sinks>(capsule);
  for (const NodePtr& node : sinks.graph) stamp(node);
  for (const NodePtr& sink : sinks.nodes)
    if (sink) stamp(sink);
}

// What is left on stream `from` of the graphs behind these tensors, results of a recording that will not be
// kept: the user's accumulators are not there.
static void graphs_here(PyObject* tensors, int64_t from) {
  auto is_there = [&](const ag::Edge& edge) {
    auto stream = edge.function->stream();
    return !stream || stream->id() == from;
  };
  for (const NodePtr& node : nodes_behind(edges_of(tensors_of(tensors)), is_there))
    if (node->stream()) stamp(node);
}

// While a backward is captured, leaves that it recomputes with must not find accumulators that run on the
// caller's stream (`away`); afterwards they are back, since others may have hooks on them. `parallel`: where hooks of
// is_reduced are to run in the capture, the accumulator changes its stream.
static void sinks_away(PyObject* capsule, int away, int parallel) noexcept {
  const Sinks& sinks = inside<Sinks>(capsule);
  py::gil_scoped_release no_gil;
  for (const ag::Edge& end : sinks.ends) {
    auto* leaf = dynamic_cast<ag::AccumulateGrad*>(end.function.get());
    if (!leaf) continue;
    if (parallel && is_reduced(leaf)) {
      stamp(end.function);
      continue;
    }
    WeakNode node(away ? NodePtr() : end.function);
    std::lock_guard<std::mutex> lock(ag::impl::get_autograd_meta(leaf->variable)->mutex_);
    ag::impl::set_grad_accumulator(leaf->variable, std::move(node));
  }
}

// Run the graph with the gradients of its heads (None: nobody computed it), or rather with `aliases` of them.
// That list is emptied: then nobody else holds its tensors.
static int sinks_run(PyObject* capsule, PyObject* grads, PyObject* aliases) noexcept {
  HANDLE_TH_ERRORS
  const std::vector<ag::Edge>& heads = inside<Sinks>(capsule).heads;
  auto& given = inside<Sinks>(capsule).given;
  given.clear();
  auto* begin = new Begin();
  begin->task = &inside<Sinks>(capsule).task;
  NodePtr root = node_ptr(begin);
  for (size_t k = 0; k < heads.size(); ++k) {
    PyObject* alias = PyList_GET_ITEM(aliases, k);
    if (alias == Py_None) continue;
    begin->grads.push_back(tensor_of(alias));
    begin->add_next_edge(heads[k]);
    given.emplace_back(tensor_of(alias).getIntrusivePtr(), PyTuple_GET_ITEM(grads, k));
  }
  if (PyList_SetSlice(aliases, 0, PyList_GET_SIZE(aliases), nullptr) != 0) return -1;
  // The engine wants an input, and runs the node on that one's stream: one without memory.
  const at::Tensor& like = begin->grads.at(0);
  at::Tensor nothing = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, like.device()), nullptr, false),
      c10::computeDispatchKey(std::nullopt, c10::kStrided, like.device()), like.dtype());
  begin->add_input_metadata(nothing);
  struct Task {
    int* id;
    ~Task() { *id = NO_TASK; }
  } task{begin->task};
  py::gil_scoped_release no_gil;
  ag::Engine::get_default_engine().execute({ag::Edge(root, 0)}, {nothing}, /*keep_graph=*/true,
                                           /*create_graph=*/false, /*accumulate_grad=*/true);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

static int sinks_task(PyObject* capsule) noexcept { return inside<Sinks>(capsule).task; }

// What arrived at sink k since it was asked last: a tensor, or None.
static PyObject* sink_take(PyObject* capsule, int k) {
  auto* sink = static_cast<Sink*>(inside<Sinks>(capsule).nodes[k].get());
  at::Tensor got = std::move(sink->got);
  sink->got = at::Tensor();
  if (!got.defined()) Py_RETURN_NONE;
  for (const auto& [alias, grad] : inside<Sinks>(capsule).given)
    if (alias._unsafe_get_target() == got.unsafeGetTensorImpl()) return Py_NewRef(grad);
  return wrapped(got);
}

// --- what a tensor was before a capture that is undone ------------------------------------------

struct History {  // of one tensor; those of views and of what they are views of are different
  at::Tensor tensor;
  NodePtr grad_fn;
  NodePtr accumulator;  // of one that requires no gradient: a capture in which it begins to makes one on its stream
  uint32_t output_nr = 0, version = 0;
  bool requires_grad = false;
};
static PyObject* histories(PyObject* tensors) {
  std::vector<History> histories;
  auto note = [&](const at::TensorBase& t) {
    const ag::AutogradMeta* m = autograd_meta_of(t.unsafeGetTensorImpl());
    History h{at::Tensor(t)};
    h.version = t.is_inference() ? 0 : t.unsafeGetTensorImpl()->version_counter().current_version();
    if (m) h.grad_fn = m->grad_fn_, h.output_nr = m->output_nr_, h.requires_grad = m->requires_grad_;
    if (m && !h.requires_grad) h.accumulator = m->grad_accumulator_.lock();
    histories.push_back(std::move(h));
  };
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(tensors); ++k) {
    const at::Tensor& t = tensor_of(PyList_GET_ITEM(tensors, k));
    note(t);
    if (t.is_view()) note(t._base());
  }
  return handle_new(std::move(histories));
}

// An op in place has led these tensors' histories through a graph that will never have run.
static void histories_restore(PyObject* capsule) noexcept {
  for (History& h : inside<std::vector<History>>(capsule)) {
    ag::AutogradMeta* m = autograd_meta_of(h.tensor.unsafeGetTensorImpl());
    if (m) m->grad_fn_ = h.grad_fn, m->output_nr_ = h.output_nr, m->requires_grad_ = h.requires_grad;
    if (m && !h.requires_grad) {
      py::gil_scoped_release no_gil;
      std::lock_guard<std::mutex> lock(m->mutex_);
      m->grad_accumulator_ = WeakNode(h.accumulator);
    }
    if (h.tensor.is_inference()) continue;
    c10::VariableVersion counter = h.tensor.unsafeGetTensorImpl()->version_counter();
    counter.set_version(h.version);
  }
}

// --- the node of a replayed forward --------------------------------------------------------------

typedef void (*released_fn)(int path, int64_t step);
typedef PyObject* (*spent_fn)(int node, int path, int64_t step, PyObject** grads, int n, PyObject* saved);

// What a tensor was when it was saved: modified in place since, or given other memory (.data =), it is not that.
// A rescue moves the bytes under a storage, which stays.
struct Version {
  uint32_t number;
  const void* storage;
  bool operator==(const Version& v) const { return number == v.number && storage == v.storage; }
};

// An argument of the call, which may be gone or another when a backward asks for a graph and the call is run again.
struct Input {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  Version version;
};

struct Backward : ag::Node {
  PyObject* site = nullptr;         // owned: the jitted backward
  PyObject* saved = nullptr;        // owned: a tuple, its arguments behind the gradients; NULL: released
  std::vector<Version> versions;    // of `saved`
  std::vector<Input> inputs;        // the call's tensors, in its order
  uint64_t reached = 0;             // the versions of what the call read without its arguments, added up
  int joined = 0;                   // to so many of its edges, the first, the call contributes more than once
  int node = 0, path = 0;           // of the forward, in that iteration
  int64_t step = 0;
  bool cuts = false;                // has its Cut
  released_fn released = nullptr;
  spent_fn spent = nullptr;

  ag::variable_list apply(ag::variable_list&& grads) override;
  PyObject* run(ag::variable_list&& grads);
  PyObject* what_to_run_again(bool as_saved);
  void release_variables() override;
  std::string name() const override { return "CgtBackward"; }
  ~Backward() override {
    release_variables();
    if (!site || !Py_IsInitialized()) return;
    Gil gil;
    Py_CLEAR(site);
  }
};

// Does this thread run a jitted backward? Its forward's call has told of the thread that waits for it, so it is no
// further user of the device. Another node may call a function of a thread that has told nothing.
static thread_local int backward_depth = 0;
static inline int in_backward() noexcept { return backward_depth; }

// What the last replay of a backward in this thread returned. Per tensor in it: the first one that is the
// same tensor of the table's (often itself), or -1: a tensor of the call's.
struct Replayed {
  PyObject* result = nullptr;
  std::vector<int> cached;
};
static thread_local Replayed replayed;
static inline void backward_replayed(PyObject* result) noexcept {
  replayed.result = result;
  replayed.cached.clear();
}
static inline void backward_cached(int first) { replayed.cached.push_back(first); }

// The gradients in a jitted backward's result. One that is the table's becomes a tensor that nobody else
// holds and Python does not know, so that it can become a .grad without a copy. `ours`: which these are.
static ag::variable_list gradients_of(PyObject* result, std::vector<bool>* ours) {
  ag::variable_list flows(PyTuple_GET_SIZE(result));
  ours->assign(flows.size(), false);
  std::vector<size_t> where;        // of each tensor in the result
  for (size_t k = 0; k < flows.size(); ++k) {
    PyObject* grad = PyTuple_GET_ITEM(result, k);
    if (grad == Py_None) continue;
    int n = static_cast<int>(where.size());
    int first = result == replayed.result ? replayed.cached.at(n) : -1;
    where.push_back(k);
    (*ours)[k] = first >= 0;
    if (first < 0) {
      flows[k] = tensor_of(grad);
    } else if (first < n) {
      flows[k] = flows[where[first]];
    } else {
      const c10::TensorImpl* impl = impl_of(grad);
      flows[k] = at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), true));
    }
  }
  replayed.result = nullptr;
  return flows;
}

static Version version_of(const at::Tensor& t) {
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  return {impl->is_inference() ? 0 : impl->version_counter().current_version(),
          impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr};
}

// The indices of tensors that were modified since they were saved.
static std::vector<size_t> changed_since(PyObject* saved, const std::vector<Version>& versions) {
  std::vector<size_t> changed;
  for (size_t k = 0; k < versions.size(); ++k)
    if (!(version_of(tensor_of(PyTuple_GET_ITEM(saved, k))) == versions[k])) changed.push_back(k);
  return changed;
}

void Backward::release_variables() {
  if (!saved || !Py_IsInitialized()) return;
  Gil gil;
  if (PyObject* let_go = std::exchange(saved, nullptr)) {  // another thread may have been first
    released(path, step);
    Py_DECREF(let_go);
  }
}

// The graph task in which the engine runs this node, in this thread; or NULL: somebody called the node by hand.
// Autograd gives out its number and the address of a member.
static ag::GraphTask* task_of(const ag::Node* node) {
  if (ag::get_current_node().get() != node || ag::get_current_graph_task_id() == -1) return nullptr;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr size_t member = offsetof(ag::GraphTask, exec_info_);
#pragma GCC diagnostic pop
  auto at = reinterpret_cast<uintptr_t>(ag::get_current_graph_task_exec_info()) - member;
  auto* task = reinterpret_cast<ag::GraphTask*>(at);
  TORCH_INTERNAL_ASSERT(static_cast<int>(task->id_) == ag::get_current_graph_task_id());
  return task;
}

// What has come to an edge before this node ran, out of the engine's hands: the run adds its contributions to
// it one by one, as eager does, where the engine would add their sum. What another stream computed stays.
static at::Tensor take_arrived(ag::GraphTask& task, const ag::Edge& edge) {
  std::lock_guard<std::mutex> lock(task.mutex_);
  auto found = task.not_ready_.find(edge.function.get());
  if (found == task.not_ready_.end()) return {};
  ag::InputBuffer& inputs = found->second;
  at::Tensor& arrived = inputs.buffer.at(edge.input_nr);
  if (!arrived.defined() || at::isTensorSubclassLike(arrived)) return {};
  if (!arrived.is_cpu()) {
    if (inputs.ready_streams.at(edge.input_nr) != at::accelerator::getCurrentStream(arrived.get_device()))
      return {};
    inputs.opt_accum_streams.at(edge.input_nr).reset();  // or the engine would add to what is not there
  }
  return std::move(arrived);
}

// --- gradients where nobody listens ---------------------------------------------------------------
// To the engine an accumulator is a node like any other: a task, with a queue, a buffer and the thread's state
// set anew, some microseconds for each parameter. Where nobody could tell, a replay's node sets the gradients
// itself. The engine looks at no more edges than a node has outputs, after its post hooks: so one of these
// takes the last outputs away, and nobody else's view of the graph changes.

// How many outputs of a node that just ran in this thread are left.
struct Left {
  const ag::Node* node = nullptr;
  size_t n = 0;
};
static thread_local Left left;

struct Cut : ag::FunctionPostHook {
  const ag::Node* node;
  explicit Cut(const ag::Node* of) : node(of) {}
  ag::variable_list operator()(const ag::variable_list& outputs, const ag::variable_list&) override {
    if (left.node != node) return outputs;
    left.node = nullptr;
    return ag::variable_list(outputs.begin(), outputs.begin() + static_cast<std::ptrdiff_t>(left.n));
  }
};

static std::atomic<int64_t> quiet_total{0};  // how many were set so
static inline int64_t quiet_gradients() noexcept { return quiet_total; }

REACH(NodeMutex, &ag::Node::mutex_);  // which an accumulator holds while it adds

// The accumulator behind an edge, if nobody hears of what comes there, nothing else is to come in this task, and
// the engine would run it on this stream with this very gradient. Else NULL. The task's mutex is held.
static ag::AccumulateGrad* quiet_leaf(ag::GraphTask& task, const ag::Edge& edge, const at::Tensor& grad,
                                      const c10::Stream& stream) {
  ag::Node* node = edge.function.get();
  if (!node || typeid(*node) != typeid(ag::AccumulateGrad)) return nullptr;
  auto* leaf = static_cast<ag::AccumulateGrad*>(node);
  if (!leaf->variable.defined() || is_heard(leaf)) return nullptr;
  const at::Tensor& t = leaf->variable;
  const ag::AutogradMeta* m = autograd_meta_of(t.unsafeGetTensorImpl());
  if (m->grad_fn_ || !m->requires_grad_ || m->is_view_ || t.layout() != at::kStrided) return nullptr;
  auto count = task.dependencies_.find(node);
  if (count == task.dependencies_.end() || count->second != 1) return nullptr;
  if (!task.not_ready_.empty() && task.not_ready_.count(node)) return nullptr;
  // Autograd complains of a gradient that lies otherwise than its tensor: it, and not our copy of it.
  if (t.grad().defined() && !ag::utils::obeys_layout_contract(t.grad(), t)) return nullptr;
  const ag::InputMetadata& like = leaf->input_metadata(0);
  if (like.stream() != stream) return nullptr;
  if (!grad.defined()) return leaf;
  bool same = grad.device() == like.device() && grad.layout() == at::kStrided && like.is_same_shape(grad) &&
              (!like.grad_dtype() || *like.grad_dtype() == grad.scalar_type());
  c10::DispatchKeySet keys = grad.key_set() | t.key_set();
  return same && (keys & at::kTensorSubclassLike).empty() ? leaf : nullptr;
}

// What the accumulator does with it. An alias that nobody else holds needs no other one (its detach()).
static void quiet_give(ag::AccumulateGrad* leaf, at::Tensor&& given) {
  at::Tensor grad = std::move(given);
  std::lock_guard<std::mutex> lock(leaf->*reach(NodeMutex()));
  at::Tensor& to = leaf->variable.mutable_grad();
  if (!to.defined() && grad.use_count() == 1 && ag::utils::obeys_layout_contract(grad, leaf->variable)) {
    grad.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(false);
    to = std::move(grad);
    return;
  }
  ag::AccumulateGrad::accumulateGrad(leaf->variable, to, grad, 1, [&to](at::Tensor&& next) { to = std::move(next); });
}

// Set the gradients of the last edges, as far as they are ours and nobody listens; the rest is the engine's.
static void give_quietly(Backward* node, ag::variable_list& flows, const std::vector<bool>& ours) {
  bool others = node->post_hooks().size() > 1;   // they are shown all outputs
  if (others || c10::GradMode::is_enabled() || ag::AnomalyMode::is_enabled() || c10::impl::dispatch_mode_enabled())
    return;
  ag::GraphTask* run = task_of(node);
  if (!run || !run->exec_info_.empty()) return;    // called by hand; only some gradients are asked for
  ag::GraphTask& task = *run;
  size_t n = flows.size();
  std::vector<ag::AccumulateGrad*> leaves(n);
  {
    c10::Stream stream = node->input_metadata(0).stream();
    std::lock_guard<std::mutex> lock(task.mutex_);
    for (; n > 0 && (ours[n - 1] || !flows[n - 1].defined()); --n) {
      leaves[n - 1] = quiet_leaf(task, node->next_edge(n - 1), flows[n - 1], stream);
      if (!leaves[n - 1]) break;
    }
    if (n == flows.size()) return;
    // The caller's stream waits for those on which the last nodes ran.
    if (auto device = node->stream()) task.leaf_streams.emplace(*device);
  }
  int64_t given = 0;
  for (size_t k = n; k < flows.size(); ++k) {
    if (!flows[k].defined()) continue;
    quiet_give(leaves[k], std::move(flows[k]));
    ++given;
  }
  quiet_total += given;
  left = {node, n};
}

// Called by the engine without the GIL. Gradients that nobody computed are None.
ag::variable_list Backward::apply(ag::variable_list&& grads) {
  left.node = nullptr;
  {
    // Not before, since for a node with hooks the engine holds the gradients that came; and for good, since other
    // threads may be at a graph that is retained: they read its hooks when their apply is over.
    std::lock_guard<std::mutex> lock(mutex_);
    if (!std::exchange(cuts, true)) add_post_hook(std::make_unique<Cut>(this));
  }
  if (std::none_of(grads.begin(), grads.end(), [](const at::Tensor& g) { return g.defined(); }))
    return ag::variable_list(num_outputs());
  // Without the GIL: who holds the task's mutex may wait for it.
  ag::GraphTask* task = task_of(this);
  for (int k = 0; k < joined; ++k)
    grads.push_back(c10::GradMode::is_enabled() || !task ? at::Tensor() : take_arrived(*task, next_edge(k)));
  ag::variable_list flows;
  std::vector<bool> ours;
  {
    Gil gil;
    PyObject* result = run(std::move(grads));
    flows = gradients_of(result, &ours);
    Py_DECREF(result);
  }
  try {
    give_quietly(this, flows, ours);
  } catch (...) {                   // an accumulator fails after its node is through
    if (!task->keep_graph_) release_variables();
    throw;
  }
  return flows;
}

// Call the jitted backward: a new reference to its result. The GIL is held.
PyObject* Backward::run(ag::variable_list&& grads) {
  TORCH_CHECK(saved, ag::ERR_BACKWARD_TWICE);
  // Of vmap (is_grads_batched): without memory of its own.
  constexpr c10::DispatchKeySet wrappers({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
                                          c10::DispatchKey::FuncTorchGradWrapper});
  bool wrapped = std::any_of(grads.begin(), grads.end(), [&](const at::Tensor& g) {
    return g.defined() && g.key_set().has_any(wrappers);
  });
  Py_ssize_t n = PyTuple_GET_SIZE(saved), m = static_cast<Py_ssize_t>(grads.size());
  PyObject* args = PyTuple_New(1 + m + n);
  if (!args) throw_python();
  for (Py_ssize_t k = 0; k < m; ++k) {
    PyObject* grad = grads[k].defined() ? THPVariable_Wrap(grads[k]) : Py_NewRef(Py_None);
    PyTuple_SET_ITEM(args, 1 + k, grad);
  }
  grads.clear();                    // the recording may reuse their memory
  PyObject* kwargs = nullptr;
  PyObject* mask = nullptr;
  const std::vector<size_t> changed = changed_since(saved, versions);
  if (c10::GradMode::is_enabled() || wrapped) {
    kwargs = Py_BuildValue("{s:N}", "again", what_to_run_again(changed.empty()));
  } else if (!changed.empty()) {
    py::list list;
    for (size_t k : changed) list.append(k);
    kwargs = Py_BuildValue("{s:O}", "changed", list.ptr());
  }
  ag::GraphTask* task = task_of(this);
  if (!task || task->keep_graph_) {
    mask = Py_NewRef(Py_False);
  } else if (!kwargs) {
    // Asked while nobody but `args` holds the gradients for us, and `saved` what is saved.
    mask = spent(node, path, step, &PyTuple_GET_ITEM(args, 1), static_cast<int>(m), saved);
  }
  PyTuple_SET_ITEM(args, 0, mask ? mask : Py_NewRef(Py_None));
  for (Py_ssize_t k = 0; k < n; ++k)
    PyTuple_SET_ITEM(args, 1 + m + k, Py_NewRef(PyTuple_GET_ITEM(saved, k)));
  ++backward_depth;
  replayed.result = nullptr;
  PyObject* result = PyErr_Occurred() ? nullptr : PyObject_Call(site, args, kwargs);
  --backward_depth;
  Py_DECREF(args);
  Py_XDECREF(kwargs);
  if (!result) throw_python();
  return result;
}

// (the call's tensors, those to which its gradients flow, how many of these get several contributions, `reached`). None
// instead of a tensor that is gone or was modified; of all, if what the call saved was: not `as_saved`. NULL: an
// exception is set.
PyObject* Backward::what_to_run_again(bool as_saved) {
  std::vector<at::Tensor> given(inputs.size()), ends(num_outputs());
  for (size_t k = 0; as_saved && k < inputs.size(); ++k) {
    at::Tensor t(inputs[k].tensor.lock());
    if (t.defined() && version_of(t) == inputs[k].version) given[k] = t;
  }
  ag::edge_list edges = edges_of(given);
  for (size_t k = 0; as_saved && k < ends.size(); ++k) {
    auto* leaf = dynamic_cast<ag::AccumulateGrad*>(next_edge(k).function.get());
    auto found = std::find(edges.begin(), edges.end(), next_edge(k));
    if (leaf) ends[k] = leaf->variable;
    else if (found != edges.end()) ends[k] = given[found - edges.begin()];
  }
  auto listed = [](const std::vector<at::Tensor>& tensors) {
    PyObject* list = PyList_New(static_cast<Py_ssize_t>(tensors.size()));
    for (size_t k = 0; list && k < tensors.size(); ++k)
      PyList_SET_ITEM(list, k, tensors[k].defined() ? THPVariable_Wrap(tensors[k]) : Py_NewRef(Py_None));
    return list;
  };
  return Py_BuildValue("NNiK", listed(given), listed(ends), joined, static_cast<unsigned long long>(reached));
}

// A node whose gradients flow to these tensors, to the first `joined` from several ops; `leaves`: the call's. Lets the
// GIL go meanwhile.
static void* backward_new(PyObject* site, PyObject* saved, PyObject** flows, int n, int joined, int forward,
                          int path, int64_t step, released_fn released, spent_fn spent, PyObject** leaves,
                          int n_leaves, uint64_t reached) {
  auto* node = new Backward();
  auto owner = std::make_unique<NodePtr>(node_ptr(node));
  node->site = Py_NewRef(site);
  node->joined = joined;
  node->node = forward;
  node->path = path;
  node->step = step;
  node->released = released;
  node->spent = spent;
  std::vector<at::Tensor> ends;
  ends.reserve(n);
  for (int k = 0; k < n; ++k) ends.push_back(tensor_of(flows[k]));
  node->reached = reached;
  node->inputs.reserve(n_leaves);
  for (int k = 0; k < n_leaves; ++k) {
    const at::Tensor& t = tensor_of(leaves[k]);
    node->inputs.push_back({decltype(Input::tensor)(t.getIntrusivePtr()), version_of(t)});
  }
  node->set_next_edges(edges_of(ends));
  node->saved = Py_NewRef(saved);     // from here on it is one that is to be released
  return owner.release();
}

// t is the node's next output.
static void backward_give(void* owner, PyObject* t) {
  const NodePtr& node = *static_cast<NodePtr*>(owner);
  uint32_t k = node->add_input_metadata(tensor_of(t));
  ag::impl::set_gradient_edge(tensor_of(t), {node, k});
}

// The call is over: what is saved must not change from here on.
static void backward_arm(void* owner) noexcept {
  auto* node = static_cast<Backward*>(static_cast<NodePtr*>(owner)->get());
  Py_ssize_t n = PyTuple_GET_SIZE(node->saved);
  node->versions.resize(n);
  for (Py_ssize_t k = 0; k < n; ++k)
    node->versions[k] = version_of(tensor_of(PyTuple_GET_ITEM(node->saved, k)));
}

static void backward_drop(void* owner) noexcept { delete static_cast<NodePtr*>(owner); }

}  // namespace cgt
