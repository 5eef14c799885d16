// The collectives that this thread issues while an object lives, by their c10d names.
// Messages, which say what ranks are about to do, do not count.
#pragma once

#include <ATen/record_function.h>

#include <map>
#include <string>
#include <utility>

namespace fsdp::testing {

class IssuedCollectives {
 public:
  using Counts = std::map<std::string, int>;

  IssuedCollectives()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(&count).scopes({at::RecordScope::FUNCTION}))) {
    counts().clear();
  }
  ~IssuedCollectives() { at::removeCallback(handle_); }
  IssuedCollectives(const IssuedCollectives&) = delete;

  // Since the last call.
  static Counts take() { return std::exchange(counts(), {}); }

 private:
  static Counts& counts() {
    thread_local Counts counts;
    return counts;
  }
  static std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& function) {
    const std::string name = function.name();
    const bool is_message = name == "c10d::send" || name == "c10d::recv_";
    if (name.starts_with("c10d::") && !is_message) ++counts()[name.substr(6)];
    return nullptr;
  }

  at::CallbackHandle handle_;
};

}  // namespace fsdp::testing
