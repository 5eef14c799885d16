// A deadline for what has none of its own: store calls and connections that block in a
// socket until the other host answers, which one behind a dead link never does.
//
//   const auto look = [store, key] { return store->check({key}); };
//   const auto answer = call_with_deadline(std::chrono::seconds(2), look);
//   if (!answer) ...   // it has not come back; its thread is left alone
#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace fsdp::internal {

// Runs `call` on a thread of its own and gives its result, or nothing when it has none
// after `limit`. The thread is then abandoned and ends when `call` does, so `call` must
// own all that it uses. Rethrows what `call` throws in time.
template <class Call>
auto call_with_deadline(std::chrono::milliseconds limit, Call call)
    -> std::optional<std::invoke_result_t<Call&>> {
  std::packaged_task<std::invoke_result_t<Call&>()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace fsdp::internal
