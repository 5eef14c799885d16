// What only CUDA's own interface gives: graphs, and errors where the host would wait. The
// one file of the tests that needs CUDA's headers; without them is_there() is false.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace fsdp::testing::cuda {

// Whether this program was compiled with it.
bool is_there();

// What a graph consists of.
struct GraphNodes {
  int64_t kernels = 0;
  int64_t copies = 0;  // from memory to memory
  int64_t sets = 0;    // of memory
  int64_t others = 0;

  int64_t launches() const { return kernels + copies + sets; }
};

class Graph {
 public:
  // Captures what `body` launches; throws what the capture forbids. REQUIRES: a stream
  // other than the device's default one is current.
  explicit Graph(const std::function<void()>& body);
  ~Graph();
  Graph(Graph&&) noexcept;

  GraphNodes nodes() const;
  // On the current stream.
  void replay();

 private:
  struct Captured;
  std::unique_ptr<Captured> captured_;
};

// While it lives, operators for which the host waits throw.
class HostWaitsThrow {
 public:
  HostWaitsThrow();
  ~HostWaitsThrow();
  HostWaitsThrow(const HostWaitsThrow&) = delete;
  HostWaitsThrow& operator=(const HostWaitsThrow&) = delete;
};

}  // namespace fsdp::testing::cuda
