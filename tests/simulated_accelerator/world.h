// A world of ranks on simulated devices, and c10d backends for its groups that do what
// NCCL does: a collective is an item of a stream of the group's own (of the current
// stream, where asyncOp is false), which waits for the current stream first; wait() makes
// the stream wait that is current then, and not the host; tensors live until wait(). A
// group has this backend for the device, and Gloo for tensors on CPU.
//
//   const auto world = std::make_shared<World>();      // before the ranks start
//   run_ranks(2, [&](int64_t rank) {
//     const c10::DeviceGuard guard(device(rank));      // one device for each rank
//     const auto group = init_device_mesh(c10::kCPU, {2}).group(0);
//     serve_device(group, world);
#pragma once

#include "tests/simulated_accelerator/rendezvous.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Backend;
class ProcessGroup;
}  // namespace c10d

namespace fsdp::testing::simulated {

// Of one rank in one group.
struct Membership {
  std::string name;  // of the group; made unique by its ranks, and by how many had them before
  int rank;
  int size;
  std::vector<uint64_t> global_ranks;
  std::chrono::milliseconds timeout;
  std::string backend = "nccl";  // what the backend calls itself
};

// Where the ranks of a world meet that are threads of one process.
class World {
 public:
  // What wait() of a collective does; doing nothing is a fault, which tests must find.
  enum class Wait { kMakesStreamWait, kDoesNothing };

  explicit World(Wait wait = Wait::kMakesStreamWait) : wait_(wait) {}
  Wait wait() const { return wait_; }

  // Different for each group, the same on its ranks.
  std::string unique_name(const Membership& membership);

  struct Issue {
    std::string group;  // its unique name
    uint64_t number;    // of the collective in the group
    std::string kind;
    size_t bytes;  // of the output
  };

  // The collective that `member` issues now. The first rank to come makes it.
  std::shared_ptr<Rendezvous> meet(const Membership& member, const Issue& issue,
                                   const Exchange& exchange);

  // What each rank connected ahead of its first collective, in its order, by global rank.
  void connected(const Membership& member);
  std::map<uint64_t, std::vector<std::string>> connections();

  // What each rank issued, in its order, by global rank: the group's name, the kind, the
  // bytes. NCCL asks for one order on all ranks, across groups too.
  std::map<uint64_t, std::vector<std::string>> issued();

 private:
  struct Meeting {
    std::shared_ptr<Rendezvous> rendezvous;
    std::string kind;
    int arrived = 0;
  };

  Wait wait_;
  std::mutex mutex_;
  std::map<std::string, int> opened_;  // groups by name and ranks, for each rank
  std::map<std::pair<std::string, uint64_t>, Meeting> meetings_;
  std::map<uint64_t, std::vector<std::string>> issued_, connections_;
};

// A backend of `world` for one rank of a group. Collective over nobody: ranks meet in the
// first collective.
c10::intrusive_ptr<c10d::Backend> make_backend(std::shared_ptr<World> world, Membership member);

// A rank alone, whose peers send what it sends itself. One host thread, so that the order
// of all items is the schedule's alone.
c10::intrusive_ptr<c10d::Backend> make_lone_backend(
    Membership member, World::Wait wait = World::Wait::kMakesStreamWait);

// A new name in the library's table of backends, "simulated 1" or the like. Groups of
// that backend meet in `world`, their side groups too.
std::string backend_of(const std::shared_ptr<World>& world);

// run_ranks() over such a backend, each rank on the device of its number.
//
//   run_ranks_on_devices(2, world, [](int64_t rank) {
//     const auto mesh = init_device_mesh(kDeviceType, {2});
void run_ranks_on_devices(int64_t ranks, std::shared_ptr<World> world,
                          const std::function<void(int64_t rank)>& body);

// From now on the device's collectives of `group` go through `world`; those of tensors on
// CPU stay what they are. Local.
void serve_device(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                  std::shared_ptr<World> world);

}  // namespace fsdp::testing::simulated
