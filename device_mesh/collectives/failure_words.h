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

// Leaves `word` of rank `own` under `topic` and tells `visit`, for each of `ranks` in
// order, what that rank left there: nothing when it leaves none within a second of the
// call, as a rule because it never came to the collective. Ranks that the store has not
// answered for half a second later, over a slow link, are not visited. Afterwards throws
// what the store threw, as when the rank that serves it is gone, or DistNetworkError when
// it did not answer at all, as when the link to its host is down.
void exchange_failure_words(
    const c10::intrusive_ptr<c10d::Store>& store, const std::string& topic, int64_t own,
    const std::string& word, const std::vector<int64_t>& ranks,
    const std::function<void(int64_t rank, const std::optional<std::string>& word)>& visit);

}  // namespace fsdp::internal
