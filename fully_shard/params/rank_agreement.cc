#define XXH_INLINE_ALL
#include "fully_shard/params/rank_agreement.h"

#include "device_mesh/device_mesh.h"
#include "device_mesh/on_mesh/mesh_collectives.h"
#include "fully_shard/transport/comm_context.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

namespace fsdp::internal {
namespace {

constexpr size_t kWords = 5;  // per parameter, as Hashes has them

uint64_t mix(uint64_t seed, uint64_t value) {
  return XXH3_64bits_withSeed(&value, sizeof value, seed);
}

const char* what_differs(size_t word) {
  switch (word) {
    case 0:
      return "has another name, shape, dtype, sharded dimension or gather codec, or another place "
             "among the unit's parameters";
    case 1:
      return "started with other values; give every rank the same seed, load the same weights, or "
             "call fsdp::broadcast_states(model, mesh) before fully_shard";
    case 2:
      return "was written with other values (a reset with a rank's own seed, Embedding's max_norm "
             "with a rank's own rows): writes to sharded parameters must be the same on every rank";
    case 3:
      return "was given other values (copy_, set_data or torch::load of a plain tensor, of which "
             "each rank keeps its part): copy the same values on every rank, or write this rank's "
             "part alone (to_local(), then fsdp::mark_shard_written)";
    default:
      return "was written with other tensors without dimensions (a learning rate, a factor that a "
             "rank computed from its own data): every rank must write with the same, such as "
             "fsdp::all_reduce(loss, mesh) gives";
  }
}

bool may_be_unnoted(size_t word) { return word == 1 || word >= 3; }

// Two ranks, by their places, of which the second one says something else.
struct RanksThatDiffer {
  int64_t first, other;
};

// `said`: a word of each rank.
std::optional<RanksThatDiffer> ranks_that_differ(const std::vector<uint64_t>& said,
                                                 bool may_be_silent) {
  std::optional<size_t> first;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (may_be_silent && said[rank] == 0) continue;
    if (!first) first = rank;
    if (said[rank] != said[*first])
      return RanksThatDiffer{static_cast<int64_t>(*first), static_cast<int64_t>(rank)};
  }
  return std::nullopt;
}

// `ranks`: what they are called.
std::string in_words(const std::string& ranks, const RanksThatDiffer& found,
                     const std::string& parameter, size_t word) {
  return "parameter '" + parameter + "' of " + ranks + std::to_string(found.other) + " " +
         what_differs(word) + ". It differs from " + ranks + std::to_string(found.first) + "'s";
}

// Where the outer rank that did not write its pieces is in a word; that rank + 1.
constexpr int kSilentOuterRank = 32;

constexpr char kDecideTogether[] =
    ". A rank that skips optimizer.step(), or writes a parameter alone, goes on with another "
    "model than the others: decide together, with an all-reduce of the flag. Once every rank "
    "has written or loaded these shards, training goes on; every rank gets this error (rank ";

bool all_are(uint64_t word, const std::vector<uint64_t>& words) {
  return std::all_of(words.begin(), words.end(), [word](uint64_t other) { return other == word; });
}

std::vector<Holders> writing_in(const std::vector<NoticeWords>& words) {
  std::vector<Holders> all;
  for (const auto& each : words) all.push_back(static_cast<Holders>(each.writing));
  return all;
}

std::vector<int64_t> ranks_that_shard(const DeviceMesh& mesh) {
  const auto count = mesh.size(shard_mesh_dim(mesh));
  const auto first = mesh.ndim() == 2 ? mesh.coordinate()[0] * count : 0;
  return {mesh.ranks().begin() + first, mesh.ranks().begin() + first + count};
}

// "ranks 0, 4": those that have this rank's shards, and said `word`.
std::string ranks_with(uint64_t word, const std::vector<uint64_t>& words, const DeviceMesh& mesh) {
  std::vector<int64_t> ranks;
  for (size_t replica = 0; replica < words.size(); ++replica) {
    const auto place = static_cast<int64_t>(replica) * mesh.size(1) + mesh.coordinate()[1];
    if (words[replica] == word) ranks.push_back(mesh.ranks()[static_cast<size_t>(place)]);
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + c10::Join(", ", ranks);
}

}  // namespace

void AgreedValues::note_start(size_t param, const FSDPParam& of, const at::Tensor& whole) {
  auto& hashes = params_[param];
  hashes.start_geometry = XXH3_64bits(of.name().data(), of.name().size());
  for (const auto size : whole.sizes()) {
    hashes.start_geometry = mix(hashes.start_geometry, static_cast<uint64_t>(size));
  }
  hashes.start_geometry = mix(hashes.start_geometry, static_cast<uint64_t>(whole.scalar_type()));
  hashes.start_geometry = mix(hashes.start_geometry, Placement(of.meta().cut()).hash());
  if (const auto* const codec = of.meta().codec())
    hashes.start_geometry =
        mix(hashes.start_geometry, XXH3_64bits(codec->name.data(), codec->name.size()));
  if (whole.is_cpu()) hashes.start_values = XXH3_64bits(whole.const_data_ptr(), whole.nbytes());
}

void AgreedValues::note_member_write(size_t param, const void* bytes, int64_t nbytes,
                                     c10::Device device) {
  if (!device.is_cpu()) return;  // hashing there would stall the host
  auto& hash = params_[param].member_write;
  hash = mix(hash, XXH3_64bits(bytes, static_cast<size_t>(nbytes)));
}

void AgreedValues::note_factors(size_t param, uint64_t hash) {
  auto& factors = params_[param].factors;
  factors = std::max<uint64_t>(mix(factors, hash), 1);  // 0: not noted
}

uint64_t AgreedValues::word() const {
  uint64_t word = 0;
  for (size_t param = 0; param < params_.size(); ++param) {
    const auto& [geometry, values, write, copied, factors] = params_[param];
    const std::array all = {geometry, values, write, copied, factors};
    static_assert(all.size() == kWords);
    if (std::all_of(all.begin(), all.end(), [](uint64_t hash) { return hash == 0; })) continue;
    word = mix(word, param);
    for (const uint64_t hash : all) word = mix(word, hash);
  }
  return word;
}

bool AgreedValues::is_of_all_ranks() const {
  return std::any_of(params_.begin(), params_.end(), [](const Hashes& hashes) {
    return hashes.start_geometry != 0 || hashes.member_write != 0;
  });
}

void AgreedValues::agreed() { params_.assign(params_.size(), Hashes{}); }

std::vector<uint64_t> AgreedValues::table() const {
  static_assert(sizeof(Hashes) == kWords * sizeof(uint64_t));
  std::vector<uint64_t> words(params_.size() * kWords);
  std::memcpy(words.data(), params_.data(), params_.size() * sizeof(Hashes));
  return words;
}

std::string AgreedValues::difference_from(const std::vector<std::vector<uint64_t>>& tables,
                                          const std::vector<std::string>& names) const {
  const auto own = table();
  for (size_t word = 0; word < own.size(); ++word) {
    std::vector<uint64_t> said;
    for (const auto& table : tables) said.push_back(table.empty() ? own[word] : table[word]);
    if (const auto found = ranks_that_differ(said, /*may_be_silent=*/true))
      return in_words("shard rank ", *found, names[word / kWords], word % kWords);
  }
  return "";
}

std::string AgreedValues::difference(const DeviceMesh& mesh, int64_t dim,
                                     const std::vector<std::string>& names) {
  const std::string ranks = dim == shard_mesh_dim(mesh) ? "shard rank " : "replica ";
  const auto own = table();
  std::vector<int64_t> words(own.begin(), own.end());
  const at::Tensor of_all = agree({collectives_of(mesh, dim)},
                                  {.words = words, .what = "agreement of the parameters' hashes"})
                                .words;
  const auto* const all = of_all.const_data_ptr<int64_t>();
  for (size_t word = 0; word < words.size(); ++word) {
    std::vector<uint64_t> said;
    for (size_t rank = 0; rank < static_cast<size_t>(of_all.size(0)); ++rank)
      said.push_back(static_cast<uint64_t>(all[rank * words.size() + word]));
    const size_t what = word % kWords;
    if (const auto found = ranks_that_differ(said, may_be_unnoted(what)))
      return in_words(ranks, *found, names[word / kWords], what);
    words[word] = static_cast<int64_t>(*std::max_element(said.begin(), said.end()));
  }
  std::memcpy(static_cast<void*>(params_.data()), words.data(), params_.size() * sizeof(Hashes));
  return "";
}

RankAgreement::RankAgreement(const GroupInfo& info, const std::vector<FSDPParam>& params,
                             const ShardBuffer& shards)
    : info_(info), params_(params), shards_(shards), values_(params.size()) {
  shards_replaced();
}

void RankAgreement::shards_replaced() {
  holders_.clear();
  piece_holders_.clear();
  for (int64_t i = 0; i < shards_.layout().size(); ++i) {
    holders_.push_back(holders_of(shards_.layout().chunk(i), shards_.grid()));
    piece_holders_.push_back(holders_of_pieces(shards_.layout().chunk(i), shards_.grid()));
  }
}

void RankAgreement::shard_written(int64_t index) {
  write_runs_.written(holders_[static_cast<size_t>(index)]);
  piece_runs_.written(piece_holders_[static_cast<size_t>(index)]);
  replica_writes_.written();
}

NoticeWords RankAgreement::word_for_replicas() const {
  return info_.has_pieces() ? words_for_pieces() : NoticeWords{.writing = replica_writes_.word()};
}

NoticeWords RankAgreement::words() const {
  const auto silent = silent_outer_rank_ ? static_cast<uint64_t>(*silent_outer_rank_) + 1 : 0;
  return {.agreement = values_.word(),
          .writing = write_runs_.writing() | silent << kSilentOuterRank};
}

bool RankAgreement::hear_pieces(const std::vector<NoticeWords>& of_outer_ranks) {
  const auto all = writing_in(of_outer_ranks);
  silent_outer_rank_ = WriteRuns::silent_rank(all);
  if (silent_outer_rank_) return false;
  if (!all.empty()) piece_runs_.compared(all);
  return true;
}

void RankAgreement::check(const Gathered& gathered) {
  if (info_.exchanges_on_host()) {
    was_gathered_ |= is_of_all_ranks(gathered.from);
    return;
  }
  if (gathered.from == GatherFrom::kRead) {
    check_values_read(gathered.tables);
    return values_.agreed();
  }
  check_values(gathered.words);
  values_.agreed();
  if (is_of_all_ranks(gathered.from)) check_writes(gathered.words);
}

void RankAgreement::check_values_read(const std::vector<std::vector<uint64_t>>& tables) const {
  const bool all_say_the_same =
      std::all_of(tables.begin(), tables.end(), [](const auto& table) { return table.empty(); });
  if (all_say_the_same) return;
  const auto difference = values_.difference_from(tables, names());
  if (!difference.empty()) report_difference(difference);
}

void RankAgreement::check_writes_since_exchange(const std::vector<NoticeWords>& of_shards) {
  if (was_gathered_) check_writes(of_shards);
}

void RankAgreement::exchanged() {
  if (std::exchange(was_gathered_, false)) values_.agreed();
}

void RankAgreement::check_values_along(int64_t mesh_dim) {
  const auto difference = difference_along(mesh_dim);
  if (!difference.empty()) report_difference(difference);
}

void RankAgreement::check_writes_of_pieces(const std::vector<NoticeWords>& of_shards) const {
  for (size_t inner = 0; inner < of_shards.size(); ++inner) {
    const auto silent = static_cast<int64_t>(of_shards[inner].writing >> kSilentOuterRank);
    if (silent > 0) report_silent(static_cast<int64_t>(inner), silent - 1);
  }
}

void RankAgreement::report_silent(int64_t inner_rank, int64_t outer_rank) const {
  const auto& mesh = info_.mesh();
  const auto place = static_cast<size_t>(outer_rank * mesh.size(1) + inner_rank);
  TORCH_CHECK_VALUE(false, "not all ranks wrote the shards of unit '", info_.name(),
                    "' (the first parameter is '", first_name(),
                    "') since they were gathered last: rank ", mesh.ranks()[place],
                    " did not, and others along the outer dimension did", kDecideTogether,
                    info_.rank(), ")");
}

// A rank that took no part in a run of writes has another model than the others.
void RankAgreement::check_writes(const std::vector<NoticeWords>& of_shards) {
  check_writes_of_pieces(of_shards);
  const auto all = writing_in(of_shards);
  if (WriteRuns::all_took_part(all)) {
    if (write_runs_.compared(all)) replica_writes_.run_ended();
    return;
  }
  TORCH_CHECK_VALUE(false, "not all ranks wrote the shards of unit '", info_.name(),
                    "' (the first parameter is '", first_name(),
                    "') since it was gathered last: they have been written ",
                    write_runs_.describe(all, ranks_that_shard(info_.mesh())), kDecideTogether,
                    info_.rank(), ")");
}

void RankAgreement::check_replica_writes(const std::vector<NoticeWords>& of_replicas) {
  if (info_.has_pieces()) {
    if (hear_pieces(of_replicas)) return;
    report_silent(shards_.grid().inner_rank, *silent_outer_rank_);
  }
  std::vector<uint64_t> words;
  for (const auto& each : of_replicas) words.push_back(each.writing);
  if (ReplicaWrites::agree(words)) return replica_writes_.compared(words);
  TORCH_CHECK_VALUE(
      false, "not all replicas wrote the shards of unit '", info_.name(),
      "' (the first parameter is '", first_name(),
      "') since their gradients were added up last: written on ",
      ranks_with(ReplicaWrites::kWrote, words, info_.mesh()), ", not on ",
      ranks_with(ReplicaWrites::kDidNot, words, info_.mesh()),
      ". A rank that skips optimizer.step(), or writes a parameter alone, goes on with another "
      "model than the others: decide together, with an all-reduce of the flag. The gradients of "
      "this backward were dropped, and those of earlier ones that were not in .grad yet, as after "
      "set_is_last_backward(false). Once every rank has written or loaded these shards, training "
      "goes on; every rank gets this error (rank ",
      info_.rank(), ")");
}

// All ranks learn of a difference, whether it is among those that shard or between
// replicas. Where there is nothing to agree on, no rank asks the replicas; nor of copies
// alone, which not all ranks need have noted.
void RankAgreement::check_values(const std::vector<NoticeWords>& of_shards) {
  auto* const replicas = info_.replicas();
  const bool asks = replicas && values_.is_of_all_ranks() && replicas->checks_stamps();
  std::string here;
  if (!all_are(values_.word(), agreements_in(of_shards)))
    here = difference_along(shard_mesh_dim(info_.mesh()));
  const uint64_t word = here.empty() ? values_.word() : AgreedValues::kDiffer;
  const auto of_replicas = asks ? info_.words_of_replicas(word) : std::vector<uint64_t>();
  if (!here.empty()) report_difference(here);
  const auto differ = std::find(of_replicas.begin(), of_replicas.end(), AgreedValues::kDiffer);
  if (differ != of_replicas.end()) report_difference_in(differ - of_replicas.begin());
  if (all_are(word, of_replicas)) return;
  const std::string between = difference_along(*replicate_mesh_dim(info_.mesh()));
  if (!between.empty()) report_difference(between);
}

std::string RankAgreement::difference_along(int64_t mesh_dim) {
  return values_.difference(info_.mesh(), mesh_dim, names());
}

std::vector<std::string> RankAgreement::names() const {
  std::vector<std::string> names;
  for (const auto& param : params_) names.push_back(param.name());
  return names;
}

void RankAgreement::report_difference_in(int64_t replica) const {
  TORCH_CHECK_VALUE(false, "parameters of unit '", info_.name(), "' (the first is '", first_name(),
                    "') differ among the ranks of replica ", replica,
                    ", which name the parameter and what happened; every rank gets an error (rank ",
                    info_.rank(), ")");
}

void RankAgreement::report_difference(const std::string& what) const {
  TORCH_CHECK_VALUE(false, what, "; every rank gets this error (rank ", info_.rank(), ")");
}

}  // namespace fsdp::internal
