// What the ranks of a failed collective tell one another: a word each, left in a store.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace fsdp::internal {

struct FailureWord {
  std::string topic;
  int64_t own = 0;  // this rank
  std::string word = {};
  std::vector<int64_t> ranks = {};  // who are asked
  std::vector<int64_t> gone = {};   // those of them that can not leave a word any more
};

// Leaves `word` of rank `own` under `topic` and tells `visit`, for each of `ranks` in
// order, what that rank left there: nothing when it leaves none within a second of the
// call, as a rule because it never came to the collective; of one that is gone, at once.
// Ranks that the store has not
// answered for half a second later, over a slow link, are not visited. Afterwards throws
// what the store threw, as when the rank that serves it is gone, or DistNetworkError when
// it did not answer at all, as when the link to its host is down.
void exchange_failure_words(
    const c10::intrusive_ptr<c10d::Store>& store, const FailureWord& left,
    const std::function<void(int64_t rank, const std::optional<std::string>& word)>& visit);

}  // namespace fsdp::internal
