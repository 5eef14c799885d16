#include "fully_shard/params/residency.h"

#include <stdexcept>
#include <string>

namespace fsdp::internal {

const char* to_string(Residence residence) {
  switch (residence) {
    case Residence::kBorrowed:
      return "borrowed";
    case Residence::kSharded:
      return "sharded";
    case Residence::kGathering:
      return "gathering";
    case Residence::kResident:
      return "resident";
  }
  return "unknown";
}

void Residency::move(Residence from, Residence to) {
  if (state_ != from) {
    throw std::logic_error(std::string("a ") + to_string(state_) + " group can not become " +
                           to_string(to));
  }
  state_ = to;
}

void Residency::emptied() {
  if (is_held()) throw std::logic_error("a held group can not be emptied");
  move(Residence::kResident, Residence::kSharded);
}

void Residency::hold() {
  if (!is_resident() && !is_borrowed()) {
    throw std::logic_error(std::string("a ") + to_string(state_) + " group can not be held");
  }
  ++holds_;
}

void Residency::release() {
  if (!is_held()) throw std::logic_error("a group that is not held can not be released");
  --holds_;
}

}  // namespace fsdp::internal
