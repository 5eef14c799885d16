// A thread of a test's own that computes.
#pragma once

#include <ATen/Parallel.h>

#include <future>

namespace fsdp::testing {

// Calls `body` on a new thread and waits for it; what it throws is thrown here. An
// operator there has as many threads as one here. A plain std::thread would have those of
// the process, one per core, and products of several threads have other bits than those
// of one.
template <class Body>
void on_another_thread(const Body& body) {
  const auto threads = at::get_num_threads();
  std::async(std::launch::async, [&] {
    at::set_num_threads(threads);
    body();
  }).get();
}

}  // namespace fsdp::testing
