// A variable of the environment while a scope lives.
#pragma once

#include <cstdlib>
#include <string>

namespace fsdp::testing {

class WithEnvironment {
 public:
  // REQUIRES: no other thread asks for variables meanwhile.
  WithEnvironment(std::string name, const std::string& value) : name_(std::move(name)) {
    const char* const before = std::getenv(name_.c_str());
    had_ = before != nullptr;
    if (had_) before_ = before;
    setenv(name_.c_str(), value.c_str(), /*replace=*/1);
  }
  ~WithEnvironment() {
    if (had_) {
      setenv(name_.c_str(), before_.c_str(), /*replace=*/1);
    } else {
      unsetenv(name_.c_str());
    }
  }
  WithEnvironment(const WithEnvironment&) = delete;
  WithEnvironment& operator=(const WithEnvironment&) = delete;

 private:
  std::string name_, before_;
  bool had_ = false;
};

}  // namespace fsdp::testing
