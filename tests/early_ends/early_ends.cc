// Ranks whose program ends while the others are still busy with what they did last
// together: the others finish that, and what needs the rank that has ended gives an error
// that says so. Nobody is aborted, and nobody hangs.
//
//   early_ends_table                        the whole table, 20 runs for each place
//   early_ends_table --runs=2 --load=0      fewer, without busy processes beside them
//   early_ends_table --seconds=40           places of the table at random for so long
//   early_ends_table --only=init/return/off those whose name has that in it
//   early_ends_table --share=0/4            the first of four shares of that
//
// Prints a line for each thing done last, each way to end and each transport, with what
// became of it, and the texts. Exits with 0 when all is as it should be, else with 1.
#include "device_mesh/all_reduce.h"
#include "device_mesh/device_mesh.h"
#include "device_mesh/process_group.h"
#include "tests/early_ends/forked_ranks.h"
#include "tests/early_ends/last_collective.h"
#include "tests/support/slowdown.h"
#include "tests/support/temporary_folder.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fsdp::testing {
namespace {

using Clock = std::chrono::steady_clock;

struct Place {
  std::string last, end, transport;
  int64_t world = 2;
  bool quick_is_zero = true;

  std::string row() const { return last + "/" + end + "/" + transport; }
  std::string name() const {
    return row() + (quick_is_zero ? "/rank 0" : "/last rank") + " of " + std::to_string(world);
  }
  int64_t quick() const { return quick_is_zero ? 0 : world - 1; }
};

// What differs from run to run.
struct Draw {
  bool large;     // rows
  bool stops;     // the quick rank stops the others before it ends
  bool repeats;   // the others then do the same again; else a barrier
  bool destroys;  // the others end with destroy_process_group()
};

const std::vector<std::string> kEnds = {"return",    "destroy", "exit", "exit_in_thread",
                                        "exception", "statics", "_exit"};
const std::vector<std::string> kTransports = {"on", "copy", "off"};

std::vector<Place> whole_table() {
  std::vector<Place> places;
  for (const auto& last : last_collectives()) {
    for (const auto& end : kEnds) {
      for (const auto& transport : kTransports) {
        for (const int64_t world : {2, 4}) {
          for (const bool quick_is_zero : {true, false})
            places.push_back({last, end, transport, world, quick_is_zero});
        }
      }
    }
  }
  return places;
}

// Destroyed when the program ends, with the models and meshes in it.
LastCollective& kept_until_statics_go() {
  static LastCollective kept;
  return kept;
}

int end_of_program(const std::string& end) {
  if (end == "destroy") destroy_process_group();
  if (end == "exit") std::exit(0);
  if (end == "exit_in_thread") std::thread([] { std::exit(0); }).join();
  if (end == "exception") throw std::runtime_error("the caller's own");
  if (end == "_exit") _exit(0);
  return 0;
}

// What main() does on every rank.
int run_rank(const Place& place, const Draw& draw, const std::string& folder, int64_t rank,
             Board& board) {
  at::set_num_threads(1);
  if (rank == place.quick()) setpriority(PRIO_PROCESS, 0, -15);  // where that is allowed
  const auto mesh = default_mesh();
  std::printf("met\n");
  auto last = prepare(place.last, mesh, {.large = draw.large, .folder = folder});
  last();
  std::printf("finished\n");
  if (place.end == "statics") kept_until_statics_go() = last;
  if (rank == place.quick()) {
    if (draw.stops) board.stop_others_than(rank);
    return end_of_program(place.end);
  }
  const auto go_on = [](const auto& step) {
    try {
      step();
    } catch (const c10::Error& error) {
      std::printf("told: %s\n", error.what_without_backtrace());
    }
  };
  go_on([&] { draw.repeats&& place.last != "init" ? last() : barrier(mesh); });
  last = {};
  if (draw.destroys) go_on(destroy_process_group);
  return 0;
}

struct Fault {
  std::string place, what, output;
};

class Table {
 public:
  void run(const Place& place, const Draw& draw) {
    const TemporaryFolder folder(memory_folder());
    const auto ends = run_forked({.world = place.world,
                                  .environment = {{"FSDP_PEER_MEMORY", place.transport},
                                                  {"OMP_NUM_THREADS", "1"},
                                                  {"TORCH_CPP_LOG_LEVEL", "ERROR"}},
                                  .deadline = kSlowdown * std::chrono::seconds(60)},
                                 [&](int64_t rank, Board& board) {
                                   return run_rank(place, draw, folder.path(), rank, board);
                                 });
    ++runs_;
    auto& row = rows_[place.row()];
    ++row["runs"];
    for (int64_t rank = 0; rank < place.world; ++rank) {
      const auto& end = ends[static_cast<size_t>(rank)];
      const auto fault = rank == place.quick()
                             ? fault_of_quick(place, end)
                             : fault_of(place, end, who_may_be_named(place, ends));
      if (fault.empty()) continue;
      ++row["FAULTS"];
      std::string outputs;
      for (size_t each = 0; each < ends.size(); ++each)
        outputs += "--- rank " + std::to_string(each) + "\n" + ends[each].output;
      faults_.push_back({place.name() + (draw.stops ? ", stopped" : "") +
                             (draw.large ? ", large" : "") + (draw.repeats ? ", again" : ""),
                         "rank " + std::to_string(rank) + " " + fault, outputs});
      std::printf("FAULT %s: %s\n%s\n", faults_.back().place.c_str(), faults_.back().what.c_str(),
                  faults_.back().output.c_str());
      std::fflush(stdout);
    }
  }

  bool report() const {
    for (const auto& [row, counts] : rows_) {
      std::printf("%-40s", row.c_str());
      for (const auto& [what, count] : counts) std::printf(" %s %d", what.c_str(), count);
      std::printf("\n");
    }
    for (const auto& [text, count] : texts_) std::printf("%6d x %s\n", count, text.c_str());
    std::printf("%d runs, %zu faults\n", runs_, faults_.size());
    return faults_.empty();
  }

 private:
  static std::string fault_of_quick(const Place& place, const RankEnd& end) {
    if (end.hung) return "hangs";
    const int expected = place.end == "exception" ? 1 : 0;
    return end.exit_code == expected ? "" : "has exit code " + std::to_string(end.exit_code);
  }

  static bool has_finished(const RankEnd& end) {
    return end.output.find("\nfinished\n") != std::string::npos;
  }

  static bool is_told(const RankEnd& end) {
    return end.output.find("\ntold: ") != std::string::npos ||
           (!has_finished(end) && end.output.find("main caught: ") != std::string::npos);
  }

  // As a regular expression: the quick rank, and those that were told and ended for it.
  static std::string who_may_be_named(const Place& place, const std::vector<RankEnd>& ends) {
    auto ranks = std::to_string(place.quick());
    for (size_t rank = 0; rank < ends.size(); ++rank) {
      if (is_told(ends[rank])) ranks += "|" + std::to_string(rank);
    }
    return ranks;
  }

  std::string fault_of(const Place& place, const RankEnd& end, const std::string& named) {
    if (end.hung) return "hangs";
    auto& row = rows_[place.row()];
    const bool finished = has_finished(end);
    const bool told = is_told(end);
    const auto text = told ? text_of(place, end.output) : "";
    if (told) ++texts_[place.transport + (finished ? ", next: " : ", last: ") + text];
    ++row[!finished ? "told of the last" : told ? "told of the next" : "went on"];
    if (end.exit_code != (finished ? 0 : 1))
      return "has exit code " + std::to_string(end.exit_code);
    if (!finished && !told) return "neither finished nor was told";
    // A program that ends by itself lets the others finish; _exit() can not.
    if (!finished && place.end != "_exit") return "did not finish: " + text;
    const std::regex names("rank (" + named + "),? has (ended|left)\\b");
    if (told && !std::regex_search(end.output, names)) return "is not told who ended: " + text;
    return "";
  }

  // The first line, without what differs from run to run; the quick rank is Q.
  static std::string text_of(const Place& place, const std::string& output) {
    const auto told = output.find("\ntold: ");
    auto text = output.substr(told != std::string::npos ? told + 7 : output.find("main caught: "));
    text = text.substr(0, text.find('\n'));
    const std::pair<std::string, const char*> replaced[] = {
        {"\\brank " + std::to_string(place.quick()) + "\\b", "rank Q"},
        {"failed on rank \\d", "failed on rank N"},
        {"of ranks [0-9, ]+", "of ranks ... "},
        {"fsdp_test_\\d+_\\d+", "..."},
        {"process \\d+", "process ..."},
        {":\\d+", ":..."},
    };
    for (const auto& [pattern, name] : replaced)
      text = std::regex_replace(text, std::regex(pattern), name);
    return text;
  }

  int runs_ = 0;
  std::map<std::string, std::map<std::string, int>> rows_;
  std::map<std::string, int> texts_;
  std::vector<Fault> faults_;
};

struct Options {
  int64_t runs = 20;
  int64_t load = 2;
  int64_t seconds = 0;
  uint64_t seed = 1;
  std::string only;
  int64_t share = 0, shares = 1;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto equals = argument.find('=');
    const auto name = argument.substr(0, equals);
    const auto value = equals == std::string::npos ? "" : argument.substr(equals + 1);
    if (name == "--runs") {
      options.runs = std::stoll(value);
    } else if (name == "--load") {
      options.load = std::stoll(value);
    } else if (name == "--seconds") {
      options.seconds = std::stoll(value);
    } else if (name == "--seed") {
      options.seed = std::stoull(value);
    } else if (name == "--only") {
      options.only = value;
    } else if (name == "--share" && value.find('/') != std::string::npos) {
      options.share = std::stoll(value);
      options.shares = std::stoll(value.substr(value.find('/') + 1));
      if (options.share < 0 || options.share >= options.shares)
        throw std::invalid_argument(argument + ": shares of N are 0/N to (N - 1)/N");
    } else {
      throw std::invalid_argument(argument +
                                  ": allowed are --runs=N, --load=N, --seconds=N, --seed=N, "
                                  "--only=TEXT and --share=N/N");
    }
  }
  return options;
}

int run(const Options& options) {
  auto places = whole_table();
  int64_t number = 0;
  std::erase_if(places, [&](const Place& place) {
    return place.name().find(options.only) == std::string::npos ||
           number++ % options.shares != options.share;
  });
  std::vector<std::unique_ptr<BusyProcess>> load;
  for (int64_t i = 0; i < options.load; ++i) load.push_back(std::make_unique<BusyProcess>());
  std::mt19937_64 random(options.seed);
  const auto draw = [&random] {
    const auto bits = random();
    return Draw{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0};
  };
  Table table;
  const auto until = Clock::now() + std::chrono::seconds(options.seconds);
  for (int64_t run = 0; run < options.runs; ++run) {
    std::shuffle(places.begin(), places.end(), random);
    for (const auto& place : places) {
      if (options.seconds > 0 && Clock::now() >= until) return table.report() ? 0 : 1;
      table.run(place, draw());
    }
  }
  return table.report() ? 0 : 1;
}

}  // namespace
}  // namespace fsdp::testing

int main(int argc, char** argv) {
  try {
    return fsdp::testing::run(fsdp::testing::parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
