// The tensors that a load leaves as they are (LoadOptions::leave).
#pragma once

#include <set>
#include <string>
#include <vector>

namespace fsdp::internal::checkpoint {

class LeftAlone {
 public:
  explicit LeftAlone(const std::vector<std::string>& patterns)
      : patterns_(patterns), unused_(patterns.begin(), patterns.end()) {}

  // Whether a pattern means one of a tensor's names.
  bool has(const std::vector<std::string>& names);
  // Throws ValueError for a pattern that has meant no name so far.
  void check_all_used() const;

 private:
  std::vector<std::string> patterns_;
  std::set<std::string> unused_;
};

}  // namespace fsdp::internal::checkpoint
