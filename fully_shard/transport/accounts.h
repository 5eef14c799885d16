// The counters that parameter groups update while they work (fully_shard/counters.h),
// with the high-water mark of bytes. A mesh dimension has one of these (comm_context.h),
// and so has each root (units/unit.h). Local.
#pragma once

#include "fully_shard/counters.h"

#include <algorithm>

namespace fsdp::internal {

class Accounts {
 public:
  // Adds to one counter: events, or bytes (negative when they go).
  template <class Number>
  void add(Number Counters::*counter, Number amount) {
    counters_.*counter += amount;
    counters_.peak_bytes = std::max(counters_.peak_bytes, held_bytes());
  }
  void reset_peak() { counters_.peak_bytes = held_bytes(); }
  const Counters& counters() const { return counters_; }
  // Takes over what another one counted.
  void absorb(const Accounts& other) {
    const auto& from = other.counters_;
    for (auto counter : {&Counters::all_gathers,
                         &Counters::reduce_scatters,
                         &Counters::all_reduces,
                         &Counters::prefetched_all_gathers,
                         &Counters::unused_prefetches,
                         &Counters::late_reduce_scatters,
                         &Counters::reshards,
                         &Counters::all_gather_bytes,
                         &Counters::reduce_scatter_bytes,
                         &Counters::outer_all_gathers,
                         &Counters::outer_reduce_scatters,
                         &Counters::all_reduce_bytes,
                         &Counters::outer_all_gather_bytes,
                         &Counters::outer_reduce_scatter_bytes,
                         &Counters::sharded_bytes,
                         &Counters::inner_shard_bytes,
                         &Counters::unsharded_bytes,
                         &Counters::in_place_bytes,
                         &Counters::post_forward_bytes,
                         &Counters::staging_bytes,
                         &Counters::gradient_bytes}) {
      counters_.*counter += from.*counter;
    }
    counters_.wait_seconds += from.wait_seconds;
    counters_.peak_bytes = std::max({counters_.peak_bytes, from.peak_bytes, held_bytes()});
  }

 private:
  int64_t held_bytes() const {
    return counters_.unsharded_bytes + counters_.post_forward_bytes + counters_.staging_bytes +
           counters_.gradient_bytes;
  }

  Counters counters_;
};

}  // namespace fsdp::internal
