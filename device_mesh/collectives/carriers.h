// The three ways in which the bytes of a collective travel; collectives.cc decides which.
//
//   by notice    with the announcement: read where the sender has them, where the ranks
//                share memory; in the same message, where they are few, over Gloo
//   by messages  Gloo: from each rank to each, posted together with the announcement; also
//                what a group of one starts, which has nobody to send to
//   by backend   by the collective of c10d's backend
//
// Each announces `operation` on the group's log, posts what it sends and returns at once.
// Sums are added in the order of the ranks, 16-bit types in float; a backend adds others
// in an order of its own.
// Arguments as Collectives has them, checked already. Collective over the group.
#pragma once

#include "device_mesh/collectives/backend/row_exchange.h"
#include "device_mesh/collectives/collectives.h"
#include "device_mesh/collectives/issue_log.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::internal {

// `rows`: uint8, [1, bytes] for all ranks or [ranks, bytes], row r for rank r; undefined:
// this rank sends nothing, and the others' row of it is null.
InFlight<GatheredRows> rows_by_notice(const Collectives& on, const IssuedOperation& operation,
                                      const at::Tensor& rows);
// The sum of such rows.
InFlight<SummedRow> sum_by_notice(const Collectives& on, const IssuedOperation& operation,
                                  const at::Tensor& rows, const Summands& summands);
// Ranks share memory: they show each other all that they send, behind a table of where
// what goes to each begins, and read their parts where they lie.
InFlight<std::vector<at::Tensor>> all_to_all_by_notice(const Collectives& on,
                                                       const IssuedOperation& operation,
                                                       const AllToAllOptions& options);

InFlight<GatheredRows> all_gather_by_messages(const Collectives& on,
                                              const IssuedOperation& operation,
                                              const AllGatherOptions& options);
using Rounds = RowExchangeOptions::Rounds;
InFlight<SummedRow> reduce_scatter_by_messages(const Collectives& on,
                                               const IssuedOperation& operation,
                                               const ReduceScatterOptions& options, Rounds rounds);
// Every rank adds up one piece of the row and sends it to the others (Rabenseifner,
// "Optimization of collective reduction operations", 2004).
InFlight<SummedRow> all_reduce_by_messages(const Collectives& on, const IssuedOperation& operation,
                                           const at::Tensor& row);

InFlight<GatheredRows> all_gather_by_backend(const Collectives& on,
                                             const IssuedOperation& operation,
                                             const AllGatherOptions& options);
// Codes and 16-bit types, which it would round at every step, it only moves.
InFlight<SummedRow> reduce_scatter_by_backend(const Collectives& on,
                                              const IssuedOperation& operation,
                                              const ReduceScatterOptions& options);
InFlight<SummedRow> all_reduce_by_backend(const Collectives& on, const IssuedOperation& operation,
                                          const at::Tensor& row);
InFlight<std::vector<at::Tensor>> all_to_all_by_backend(const Collectives& on,
                                                        const IssuedOperation& operation,
                                                        const AllToAllOptions& options);

}  // namespace fsdp::internal
