// What the ranks of a failed collective tell one another: a word each, left in a store.
#pragma once

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
// call, as a rule because it never came to the collective. Throws what the store throws,
// as when the rank that serves it is gone.
void exchange_failure_words(
    c10d::Store& store, const std::string& topic, int64_t own, const std::string& word,
    const std::vector<int64_t>& ranks,
    const std::function<void(int64_t rank, const std::optional<std::string>& word)>& visit);

}  // namespace fsdp::internal
