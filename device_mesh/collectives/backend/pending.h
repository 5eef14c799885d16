// A collective, or one message, in flight.
#pragma once

#include "device_mesh/collectives/group.h"

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>

namespace c10d {
class Work;
}

namespace fsdp::internal {

// Destroying one that was not waited for waits, and swallows its error.
class Pending {
 public:
  Pending();
  // `completion`, if any, runs in the first successful wait(), after the backend's work.
  Pending(Group group, c10::intrusive_ptr<c10d::Work> work, std::function<void()> completion = {});
  Pending(Pending&&) noexcept;
  Pending& operator=(Pending&&) noexcept;
  ~Pending();
  // A collective that could not even be issued: wait() tells.
  Pending(Group group, std::exception_ptr failure);
  // Of tensors on a device: wait() makes the current stream wait and not the host, so
  // there is no long wait to tell, and the backend is not asked whether it has finished,
  // which no graph that is being captured allows.
  Pending& awaited_by_stream();
  // Of a message: the group rank at the other end, for what is told of a long wait.
  Pending& with_peer(int64_t group_rank);
  bool in_flight() const;
  // wait() would not block: nothing is in flight, or the backend has finished.
  bool finished() const;
  // Throws c10::DistBackendError that carries `what` (operation and unit), the rank, the
  // group's description, the backend's text and the ranks that did not report a failure
  // within a second, when the collective failed or timed out. A wait of more than 30 s is
  // told to stderr once; one for a message ends some seconds after the link broke, also
  // where the backend forgets it. Idempotent.
  void wait(const std::string& what);
  // As wait(), but false where somebody aborted the backend's work: it is in flight
  // still.
  bool wait_unless_aborted(const std::string& what);
  // The backend's, null when nothing is in flight.
  const c10::intrusive_ptr<c10d::Work>& work() const { return work_; }
  int64_t peer() const { return peer_; }  // -1: not a message
  // Hands over the backend's work, null when nothing is in flight; this then waits for
  // nothing (abandon()).
  c10::intrusive_ptr<c10d::Work> release();

 private:
  std::string describe_wait(const Group& group, const std::string& what) const;

  Group group_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::exception_ptr failure_;
  std::function<void()> completion_;
  int64_t peer_ = -1;
  enum class AwaitedBy { kHost, kStream } awaited_by_ = AwaitedBy::kHost;
};

// A message that nobody waits for any more, since the ranks of its group do not agree on
// what is sent: it and its memory are kept as long as the group, which may still write
// there. Nothing when it is not in flight. Thread-safe.
void abandon(const Group& group, Pending& message, std::shared_ptr<const void> memory);

// Runs `call`, which gives a c10d::Work. What the backend throws at once is told by
// wait(), which knows the operation's name.
template <class Call>
Pending issue(const Group& group, const Call& call, std::function<void()> completion = {}) {
  try {
    return {group, call(), std::move(completion)};
  } catch (const std::exception&) {
    return {group, std::current_exception()};
  }
}
// The same of a collective of tensors on `device`.
template <class Call>
Pending issue_on(c10::Device device, const Group& group, const Call& call) {
  auto pending = issue(group, call);
  if (!device.is_cpu()) pending.awaited_by_stream();
  return pending;
}

}  // namespace fsdp::internal
