// A deadline for what has none of its own: store calls and connections that block in a
// socket until the other host answers, which one behind a dead link never does.
//
//   const auto look = [store, key] { return store->check({key}); };
//   const auto answer = call_with_deadline(std::chrono::seconds(2), look);
//   if (!answer) ...   // it has not come back; its thread is left alone
#pragma once

#include <algorithm>
#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

namespace fsdp::internal {

// Runs `call` on a thread of its own and gives its result, or nothing when it has none
// after `limit`, or when `is_hopeless`, which is asked ten times a second. The thread is
// then abandoned and ends when `call` does, so `call` must own all that it uses. Rethrows
// what `call` throws in time.
template <class Call, class IsHopeless>
auto call_with_deadline(std::chrono::milliseconds limit, Call call, IsHopeless is_hopeless)
    -> std::optional<std::invoke_result_t<Call&>> {
  constexpr auto kLook = std::chrono::milliseconds(100);
  std::packaged_task<std::invoke_result_t<Call&>()> task(std::move(call));
  auto result = task.get_future();
  std::thread(std::move(task)).detach();
  for (auto left = limit; result.wait_for(std::min(left, kLook)) != std::future_status::ready;
       left -= kLook) {
    if (left <= kLook || is_hopeless()) return std::nullopt;
  }
  return result.get();
}

template <class Call>
auto call_with_deadline(std::chrono::milliseconds limit, Call call) {
  return call_with_deadline(limit, std::move(call), [] { return false; });
}

}  // namespace fsdp::internal
