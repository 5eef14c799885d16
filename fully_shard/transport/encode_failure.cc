#include "fully_shard/transport/encode_failure.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/words_and_texts.h"

namespace fsdp::internal {

void EncodeFailure::raise(const Collectives& on, const std::string& what) const {
  const auto errors = texts_of_all({on}, {.text = error_, .what = "errors of codecs"});
  const auto& ranks = on.log()->ranks();
  for (size_t i = 0; i < errors.size(); ++i) {
    TORCH_CHECK(errors[i].empty(), what, ": on rank ", ranks[i], " ", errors[i],
                "; every rank that waits for it gets this error (rank ",
                ranks[static_cast<size_t>(on.rank())], ")");
  }
  TORCH_INTERNAL_ASSERT(false, "no rank failed");
}

}  // namespace fsdp::internal
