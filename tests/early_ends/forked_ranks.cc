#include "tests/early_ends/forked_ranks.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>

namespace fsdp::testing {
namespace {

using Clock = std::chrono::steady_clock;

int free_port() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool found = bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  close(listener);
  TORCH_CHECK(found, "no free port on the loopback address: ", std::strerror(errno));
  return ntohs(address.sin_port);
}

std::shared_ptr<Board> make_board() {
  void* const memory =
      mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "mmap: ", std::strerror(errno));
  auto* const board = new (memory) Board{};
  board->stopper = -1;
  return {board, [](Board* mapped) { munmap(mapped, sizeof(Board)); }};
}

class Forked {
 public:
  Forked(const std::map<std::string, std::string>& environment, const std::function<int()>& body) {
    std::array<int, 2> ends{};
    TORCH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0, "pipe: ", std::strerror(errno));
    pid_ = fork();
    TORCH_CHECK(pid_ >= 0, "fork: ", std::strerror(errno));
    if (pid_ == 0) be_child(ends, environment, body);
    close(ends[1]);
    output_fd_ = ends[0];
    fcntl(output_fd_, F_SETFL, O_NONBLOCK);
  }

  pid_t pid() const { return pid_; }
  bool ended() const { return status_.has_value(); }

  void look() {
    read_output();
    int status = 0;
    if (!ended() && waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
  }

  void kill_hung() {
    end_.hung = true;
    kill(pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
    status_ = status;
  }

  RankEnd take() {
    read_output();
    close(output_fd_);
    end_.exit_code = WIFSIGNALED(*status_) ? 128 + WTERMSIG(*status_) : WEXITSTATUS(*status_);
    return std::move(end_);
  }

 private:
  [[noreturn]] static void be_child(const std::array<int, 2>& ends,
                                    const std::map<std::string, std::string>& environment,
                                    const std::function<int()>& body) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    setvbuf(stdout, nullptr, _IOLBF, 0);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    int code = 1;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::printf("main caught: %s\n", error.what());
    }
    std::exit(code);  // as the return of main()
  }

  void read_output() {
    std::array<char, 4096> buffer;
    ssize_t count = 0;
    while ((count = read(output_fd_, buffer.data(), buffer.size())) > 0)
      end_.output.append(buffer.data(), static_cast<size_t>(count));
  }

  pid_t pid_ = 0;
  int output_fd_ = -1;
  std::optional<int> status_;
  RankEnd end_;
};

// Lets those go on that were stopped, once the rank that did it has ended; one that waits
// for them at its end may not be kept waiting for good.
class Release {
 public:
  Release(Board& board, const std::vector<Forked>& ranks) : board_(board), ranks_(ranks) {}

  void look() {
    constexpr auto kAtMost = std::chrono::milliseconds(300);
    const auto stopper = board_.stopper.load();
    if (stopper < 0) return;
    const auto now = Clock::now();
    if (since_ == Clock::time_point()) since_ = now;
    if (!ranks_[static_cast<size_t>(stopper)].ended() && now - since_ < kAtMost) return;
    for (const auto& rank : ranks_) {
      if (!rank.ended()) kill(rank.pid(), SIGCONT);
    }
    board_.stopper = -1;
    since_ = {};
  }

 private:
  Board& board_;
  const std::vector<Forked>& ranks_;
  Clock::time_point since_ = {};
};

}  // namespace

void Board::stop_others_than(int64_t rank) {
  for (size_t other = 0; other < pids.size(); ++other) {
    if (static_cast<int64_t>(other) != rank && pids[other] != 0) kill(pids[other], SIGSTOP);
  }
  stopper = rank;
}

std::vector<RankEnd> run_forked(const ForkOptions& options,
                                const std::function<int(int64_t rank, Board& board)>& body) {
  const auto board = make_board();
  auto environment = options.environment;
  environment["WORLD_SIZE"] = std::to_string(options.world);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(free_port());
  std::fflush(nullptr);
  std::vector<Forked> ranks;
  for (int64_t rank = 0; rank < options.world; ++rank) {
    environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
    ranks.emplace_back(environment, [&] { return body(rank, *board); });
    board->pids[static_cast<size_t>(rank)] = ranks.back().pid();
  }
  auto until = Clock::now() + options.deadline;
  Release release(*board, ranks);
  const auto all_ended = [&] {
    return std::all_of(ranks.begin(), ranks.end(), [](const auto& rank) { return rank.ended(); });
  };
  while (!all_ended() && Clock::now() < until) {
    constexpr auto kUnseen = std::chrono::seconds(1);  // while this process itself stood still
    const auto before = Clock::now();
    poll(nullptr, 0, 5);
    const auto passed = Clock::now() - before;
    if (passed > kUnseen) until += passed;
    for (auto& rank : ranks) rank.look();
    release.look();
  }
  std::vector<RankEnd> ends;
  for (auto& rank : ranks) {
    if (!rank.ended()) rank.kill_hung();
    ends.push_back(rank.take());
  }
  return ends;
}

BusyProcess::BusyProcess() : pid_(fork()) {
  if (pid_ != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  for (volatile bool goes_on = true; goes_on;) continue;
}

BusyProcess::~BusyProcess() {
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

}  // namespace fsdp::testing
