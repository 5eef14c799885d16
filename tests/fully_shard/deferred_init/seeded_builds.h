// Building models from LibTorch's default generator, which ranks that are threads share.
#pragma once

#include "tests/support/default_generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cstdint>

namespace fsdp::testing {

// What build() gives, drawing from the default generator seeded with `seed`, and the
// state in which that leaves the generator. One thread at a time.
template <class Built>
struct SeededBuild {
  Built built;
  torch::Tensor state_after;
};
template <class Build>
auto built_from_seed(uint64_t seed, const Build& build) {
  return drawn_from_seed(seed, [&] {
    auto built = build();
    return SeededBuild<decltype(built)>{std::move(built),
                                        at::detail::getDefaultCPUGenerator().get_state()};
  });
}

}  // namespace fsdp::testing
