#include "dtensor/redistribute/scalar_agreement.h"

#include "dtensor/redistribute/comm_listener.h"

#include <c10/util/Exception.h>

#include <string>

namespace fsdp::internal {
namespace {

// The word of a rank that found others to differ, so that those which it meets along the
// next mesh dimension learn of it; and of one that has nothing to say.
constexpr uint64_t kDiffer = 1, kNothing = 2;
static_assert(kDiffer <= ScalarHash::kReserved && kNothing <= ScalarHash::kReserved);

std::string names_of(const std::array<const char*, 3>& operators) {
  std::string names;
  for (const char* const name : operators)
    if (name != nullptr) names += (names.empty() ? "" : ", ") + std::string(name);
  return names.empty() ? "no operator" : names;
}

}  // namespace

ScalarAgreement::ScalarAgreement(const ScalarHash& scalars, bool has_elements)
    : taken_by_(scalars.taken_by), word_(has_elements ? scalars.hash : kNothing) {}

void ScalarAgreement::compare(const std::vector<NoticeWords>& words) {
  for (const NoticeWords& theirs : words) {
    if (theirs.agreement == kNothing || theirs.agreement == word_) continue;
    word_ = word_ == kNothing ? theirs.agreement : kDiffer;
  }
}

void ScalarAgreement::check(const DeviceMesh& mesh) const {
  if (word_ != kDiffer) return;
  const std::string mover = CommOperatorScope::current();
  TORCH_CHECK_VALUE(
      false, mover.empty() ? "full_tensor() or redistribute()" : mover,
      " makes whole what was computed from a sharded parameter with a number that is not the same "
      "on all ranks of ",
      mesh, "; the last ones here were given to ", names_of(taken_by_),
      ". Each rank computed its part with its own. Give it as a tensor, torch::tensor(number), "
      "whose results are this rank's own and whole, or give every rank the same number (rank ",
      mesh.rank(), "; so does every rank that the value was to be brought together with)");
}

}  // namespace fsdp::internal
