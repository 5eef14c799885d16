#include "programs/planner/plan_text.h"

#include "programs/words.h"

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <numeric>

namespace programs {
namespace {

constexpr size_t kShownPolicies = 5;

double gib(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

Link link_used_by(const Traffic& traffic, const PlannedJobText& job) {
  const auto& names = job.mesh.names;
  const auto dim = std::find(names.begin(), names.end(), traffic.dim);
  TORCH_INTERNAL_ASSERT(dim != names.end());
  return link_of(job.mesh.shape, static_cast<size_t>(dim - names.begin()), traffic.group,
                 job.ranks_per_node);
}

const char* link_name(Link link) {
  return link == Link::kWithinNode ? "within a node" : "between nodes";
}

// "2048 dp x 8 tp"
std::string mesh_text(const PlannedJobText& job) {
  std::string text;
  const auto& [shape, names] = job.mesh;
  for (size_t d = 0; d < shape.size(); ++d)
    text += (d == 0 ? "" : " x ") + std::to_string(shape[d]) + " " + names[d];
  return text;
}

std::string memory_table(const StepMemory& memory, const PlannedJobText& job) {
  const char* row = "  %-34s %10.3f\n";
  std::string text =
      formatted("memory of rank %lld %30s\n", static_cast<long long>(job.rank), "GiB");
  text += formatted(row, "parameters, shards", gib(memory.parameters));
  text += formatted(row, "gradients, shards", gib(memory.gradients));
  text += formatted(row, "optimizer state", gib(memory.optimizer));
  text += formatted(row, "unsharded, staging, at most", gib(memory.sharding_peak));
  text += formatted(row, job.recomputes ? "activations, recomputed" : "activations",
                    gib(memory.activations));
  text += formatted(row, (std::string("peak of all, in ") + name(memory.peak_phase)).c_str(),
                    gib(memory.peak));
  if (job.otherwise) {
    text += formatted("  with activations %s: %.3f, peak %.3f\n",
                      job.recomputes ? "kept" : "recomputed", gib(job.otherwise->activations),
                      gib(job.otherwise->peak));
  }
  return text;
}

std::string traffic_table(const MeasuredStep& step, const PlannedJobText& job) {
  std::string text = formatted("%-12s %-16s %6s %7s %12s  %s\n", "one step", "collective", "ranks",
                               "count", "GiB received", "link");
  for (const auto& one : step.traffic) {
    text +=
        formatted("  %-10s %-16s %6lld %7lld %12.3f  %s\n", one.dim.c_str(), one.collective.c_str(),
                  static_cast<long long>(one.group), static_cast<long long>(one.count),
                  gib(one.bytes), link_name(link_used_by(one, job)));
  }
  return step.traffic.empty() ? "one step receives nothing\n" : text;
}

std::string estimate_text(const MeasuredStep& step, const PlannedJobText& job) {
  const auto estimate = estimate_step(step.flops, link_bytes(step, job), job.rates);
  std::string text =
      formatted("one step computes %.4g FLOP on a rank, for %.4g tokens of all ranks\n", step.flops,
                job.tokens);
  text += formatted(
      "estimate, with %.0f TFLOP/s, %.0f GB/s within and %.0f GB/s between nodes: %.3f s to "
      "compute, %.3f s to receive;\n",
      job.rates.flops_per_second / 1e12, job.rates.node_bytes_per_second / 1e9,
      job.rates.network_bytes_per_second / 1e9, estimate.compute_seconds,
      estimate.communication_seconds);
  return text +
         formatted("  %.3f s (%.4g tokens/s) where all of it overlaps, %.3f s where none does\n",
                   estimate.least_seconds(), job.tokens / estimate.least_seconds(),
                   estimate.most_seconds());
}

nlohmann::json memory_json(const StepMemory& memory) {
  return {{"parameters", memory.parameters},       {"gradients", memory.gradients},
          {"optimizer", memory.optimizer},         {"activations", memory.activations},
          {"sharding_peak", memory.sharding_peak}, {"peak", memory.peak},
          {"peak_phase", name(memory.peak_phase)}};
}

}  // namespace

LinkBytes link_bytes(const MeasuredStep& step, const PlannedJobText& job) {
  LinkBytes bytes;
  for (const auto& one : step.traffic)
    bytes.add(link_used_by(one, job), static_cast<double>(one.bytes));
  return bytes;
}

std::string text_of(const MeasuredStep& step, const PlannedJobText& job) {
  const auto ranks = std::accumulate(job.mesh.shape.begin(), job.mesh.shape.end(), int64_t{1},
                                     std::multiplies<>());
  return formatted("%.2f B parameters on %lld ranks: %s, %lld ranks a node\n\n",
                   job.parameters / 1e9, static_cast<long long>(ranks), mesh_text(job).c_str(),
                   static_cast<long long>(job.ranks_per_node)) +
         memory_table(step.memory, job) + "\n" + traffic_table(step, job) + "\n" +
         estimate_text(step, job);
}

std::string json_of(const MeasuredStep& step, const PlannedJobText& job) {
  nlohmann::json json = {{"mesh", job.mesh.shape},
                         {"mesh_dims", job.mesh.names},
                         {"memory", memory_json(step.memory)},
                         {"flops", step.flops},
                         {"tokens", job.tokens}};
  json["traffic"] = nlohmann::json::array();
  for (const auto& one : step.traffic) {
    json["traffic"].push_back({{"dim", one.dim},
                               {"collective", one.collective},
                               {"group", one.group},
                               {"count", one.count},
                               {"bytes", one.bytes},
                               {"link", link_name(link_used_by(one, job))}});
  }
  return json.dump() + "\n";
}

std::string text_of_fit(const std::vector<PlannedPolicy>& fit, const MachineRates& rates) {
  std::string text =
      formatted("%9s %9s %9s %12s  %s\n", "peak GiB", "node GiB", "net GiB", "tokens/s",
                "(estimate); what needs least time on links for a token first");
  for (size_t i = 0; i < std::min(fit.size(), kShownPolicies); ++i) {
    const auto& one = fit[i];
    const auto estimate = estimate_step(one.flops, one.received, rates);
    text += formatted("%9.2f %9.2f %9.2f %12.0f  %s\n", one.peak_bytes / kGiB,
                      one.received.within_node / kGiB, one.received.between_nodes / kGiB,
                      one.tokens / estimate.most_seconds(), to_string(one.policy).c_str());
  }
  return text;
}

}  // namespace programs
