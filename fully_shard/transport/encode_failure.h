// What a codec threw on one rank, for those that wait for its codes: that rank sends a
// row without meaning, says so in the words that travel with it, and all of them throw
// alike.
//
//   failure.keep(can_tell, [&] { codec.encode(values, row); });
//   ...row and failure.words(words) travel...
//   if (EncodeFailure::is_in(words of all)) failure.raise(ranks, "unit 'l0' was not gathered");
#pragma once

#include "device_mesh/collectives/notice.h"
#include "device_mesh/internal/text_of_error.h"
#include "fully_shard/gather_codec.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace fsdp::internal {

class Collectives;

// What `run` throws says of which codec it is. what: " of parameter 'weight' failed to
// encode". Local.
template <class Run>
void run_codec(const GatherCodec& codec, const std::string& what, const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "codec '", codec.name, "'", what, ": ", text_of(error));
  }
}

class EncodeFailure {
 public:
  // Keeps what `encode` throws, or forgets what was kept. Throws it where the ranks that
  // wait can not be told: on devices, where no words travel.
  template <class Encode>
  void keep(bool can_tell, const Encode& encode) {
    error_.clear();
    try {
      encode();
    } catch (const std::exception& error) {
      if (!can_tell) throw;
      error_ = text_of(error);
    }
  }
  // Of the row that was encoded last. Local.
  NoticeWords words(NoticeWords of_values) const {
    if (!error_.empty()) of_values.agreement = kFailed;
    return of_values;
  }
  // Of all ranks; none where none travel. Local.
  static bool is_in(const std::vector<NoticeWords>& words) {
    return std::any_of(words.begin(), words.end(),
                       [](const NoticeWords& each) { return each.agreement == kFailed; });
  }
  // Throws on all ranks of `on` alike, with `what` and the error of one that failed.
  // Collective over them.
  [[noreturn]] void raise(const Collectives& on, const std::string& what) const;

 private:
  static constexpr uint64_t kFailed = 2;  // instead of a hash of values
  std::string error_;                     // empty: none
};

}  // namespace fsdp::internal
