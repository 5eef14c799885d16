#include "fully_shard/transport/codec_failure.h"

#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"
#include "device_mesh/collectives/words_and_texts.h"

#include <algorithm>

namespace fsdp::internal {

void CodecFailure::check(const std::vector<NoticeWords>& words, const Collectives& on,
                         const std::string& what) const {
  const bool has_failed = std::any_of(words.begin(), words.end(), [](const NoticeWords& each) {
    return each.agreement == kFailed;
  });
  if (has_failed) raise(on, what);
  TORCH_CHECK(decode_error_ == nullptr || decode_error_->empty(), what, ": ", *decode_error_,
              " (rank ", on.log()->global_rank(), ")");
}

void CodecFailure::raise(const Collectives& on, const std::string& what) const {
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
