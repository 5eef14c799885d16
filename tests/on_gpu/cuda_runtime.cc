#include "tests/on_gpu/cuda_runtime.h"

#include <c10/util/Exception.h>

#ifdef USE_C10D_NCCL  // says that CUDA's headers are there
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <dlfcn.h>

#include <vector>
#endif

namespace fsdp::testing::cuda {

#ifdef USE_C10D_NCCL
namespace {

// LibTorch's libraries bring CUDA's, which this program is not linked with.
template <class Function>
Function* runtime_function(const char* name) {
  auto* const found = dlsym(RTLD_DEFAULT, name);
  TORCH_CHECK(found != nullptr, "there is no ", name, " in this process");
  return reinterpret_cast<Function*>(found);
}

GraphNodes count(cudaGraph_t graph) {
  static auto* const get_nodes = runtime_function<decltype(cudaGraphGetNodes)>("cudaGraphGetNodes");
  static auto* const get_type =
      runtime_function<decltype(cudaGraphNodeGetType)>("cudaGraphNodeGetType");
  size_t size = 0;
  TORCH_CHECK(get_nodes(graph, nullptr, &size) == cudaSuccess);
  std::vector<cudaGraphNode_t> nodes(size);
  TORCH_CHECK(get_nodes(graph, nodes.data(), &size) == cudaSuccess);
  GraphNodes counted;
  for (const auto node : nodes) {
    cudaGraphNodeType type;
    TORCH_CHECK(get_type(node, &type) == cudaSuccess);
    if (type == cudaGraphNodeTypeKernel) {
      ++counted.kernels;
    } else if (type == cudaGraphNodeTypeMemcpy) {
      ++counted.copies;
    } else if (type == cudaGraphNodeTypeMemset) {
      ++counted.sets;
    } else {
      ++counted.others;
    }
  }
  return counted;
}

}  // namespace

bool is_there() { return true; }

struct Graph::Captured {
  at::cuda::CUDAGraph graph{/*keep_graph=*/true};
};

Graph::Graph(const std::function<void()>& body) : captured_(std::make_unique<Captured>()) {
  // As autograd's threads launch, too.
  captured_->graph.capture_begin({0, 0}, cudaStreamCaptureModeGlobal);
  try {
    body();
  } catch (...) {
    try {
      captured_->graph.capture_end();
    } catch (const c10::Error&) {
      // Says only that the capture failed.
    }
    throw;
  }
  captured_->graph.capture_end();
}

GraphNodes Graph::nodes() const { return count(captured_->graph.raw_cuda_graph()); }

void Graph::replay() { captured_->graph.replay(); }

HostWaitsThrow::HostWaitsThrow() {
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR);
}
HostWaitsThrow::~HostWaitsThrow() {
  c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED);
}
#else
bool is_there() { return false; }

struct Graph::Captured {};

Graph::Graph(const std::function<void()>&) { TORCH_CHECK(false, "compiled without CUDA"); }

GraphNodes Graph::nodes() const { return {}; }

void Graph::replay() {}

HostWaitsThrow::HostWaitsThrow() = default;
HostWaitsThrow::~HostWaitsThrow() = default;
#endif

Graph::~Graph() = default;
Graph::Graph(Graph&&) noexcept = default;

}  // namespace fsdp::testing::cuda
