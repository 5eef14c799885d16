// A c10d backend that talks to nobody and completes every collective at once, to stand
// for one rank of any world inside one process. It behaves as if every other rank held
// the same data as this one would send it:
//
//   all-gather     every slot of the output is this rank's input
//   reduction      the input is kept: sum, average, minimum, maximum and product all return it
//   reduce-scatter this rank's row of the input
//   broadcast      unchanged; all-to-all copies the input to the output
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <vector>

namespace c10d {
class Backend;
}

namespace fsdp::internal {

c10::intrusive_ptr<c10d::Backend> make_fake_backend(int64_t rank, int64_t size,
                                                    std::chrono::milliseconds timeout,
                                                    std::vector<uint64_t> global_ranks);

}  // namespace fsdp::internal
