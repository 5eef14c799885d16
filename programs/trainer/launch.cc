#include "programs/trainer/launch.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

extern char** environ;

namespace programs {
namespace {

constexpr const char* kLauncherVariable =
    "FULLY_SHARD_LAUNCHER";  // the launcher's process id, in ranks it started
constexpr int64_t kRanksPerProcessor = 64;
constexpr auto kGracePeriod = std::chrono::seconds(3);  // between SIGTERM and SIGKILL

[[noreturn]] void throw_errno(const char* what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

bool started_by_another_launcher() {
  for (const char* name : {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    if (std::getenv(name)) return true;
  }
  return false;
}

// A rank leaves Ctrl-C to the launcher, which stops all ranks in one way, and does not
// outlive it.
void follow_launcher(pid_t launcher) {
  signal(SIGINT, SIG_IGN);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != launcher) _exit(1);
}

int free_port() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (listener < 0) throw_errno("socket");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, generic, size) != 0 || getsockname(listener, generic, &size) != 0)
    throw_errno("bind");
  close(listener);
  return ntohs(address.sin_port);
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  return arguments;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (auto& string : strings) result.push_back(string.data());
  result.push_back(nullptr);
  return result;
}

std::vector<std::string> rank_environment(int64_t rank, int64_t ranks, int port) {
  std::vector<std::string> environment = {
      "RANK=" + std::to_string(rank),        "LOCAL_RANK=" + std::to_string(rank),
      "WORLD_SIZE=" + std::to_string(ranks), "MASTER_ADDR=127.0.0.1",
      "MASTER_PORT=" + std::to_string(port), kLauncherVariable + ("=" + std::to_string(getpid()))};
  // The ranks' own errors say what happened; c10d's warnings add stacks for each poll.
  if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr)
    environment.push_back("TORCH_CPP_LOG_LEVEL=ERROR");
  const size_t ours = environment.size();
  for (char** entry = environ; *entry; ++entry) {
    const std::string variable = *entry;
    const std::string name = variable.substr(0, variable.find('=') + 1);
    bool overridden = false;
    for (size_t i = 0; i < ours; ++i) overridden |= environment[i].rfind(name, 0) == 0;
    if (!overridden) environment.push_back(variable);
  }
  return environment;
}

sigset_t launcher_signals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&signals, signal);
  return signals;
}

std::string describe(int status) {
  if (WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE)
    return "was stopped, since whoever read its output is gone";
  if (WIFSIGNALED(status)) {
    return "was killed by signal " + std::to_string(WTERMSIG(status)) + " (" +
           strsignal(WTERMSIG(status)) + ")";
  }
  return "failed with exit code " + std::to_string(WEXITSTATUS(status));
}

// The processes of one job. Destroying it kills those still running.
class LocalJob {
 public:
  explicit LocalJob(int64_t ranks) : processes_(static_cast<size_t>(ranks), 0) {
    const int port = free_port();
    for (int64_t rank = 0; rank < ranks; ++rank) start(rank, port);
  }
  ~LocalJob() { stop(); }
  LocalJob(const LocalJob&) = delete;
  LocalJob& operator=(const LocalJob&) = delete;

  // Returns the exit code of the job when all ranks have ended, one has failed, or a
  // signal asks to stop.
  int wait() {
    const sigset_t signals = launcher_signals();
    while (running() > 0) {
      const int signal = sigwaitinfo(&signals, nullptr);
      if (signal < 0) continue;  // interrupted by a debugger
      if (signal != SIGCHLD) {
        std::cerr << "\n"
                  << strsignal(signal) << ": stopping " << running() << " ranks" << std::endl;
        stop();
        return 128 + signal;
      }
      if (!reap()) return 1;
    }
    return 0;
  }

 private:
  void start(int64_t rank, int port) {
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    auto arguments = own_arguments();
    auto environment = rank_environment(rank, static_cast<int64_t>(processes_.size()), port);
    pid_t process = 0;
    const int error = posix_spawn(&process, "/proc/self/exe", nullptr, &attributes,
                                  pointers(arguments).data(), pointers(environment).data());
    posix_spawnattr_destroy(&attributes);
    if (error != 0) throw_errno("posix_spawn", error);
    processes_[static_cast<size_t>(rank)] = process;
  }

  size_t running() const {
    size_t count = 0;
    for (pid_t process : processes_) count += process != 0;
    return count;
  }

  // Takes note of every rank that has ended; false, with a message, when one of them
  // failed.
  bool reap() {
    int status = 0;
    for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
      for (size_t rank = 0; rank < processes_.size(); ++rank) {
        if (processes_[rank] != ended) continue;
        processes_[rank] = 0;
        if (status == 0) continue;
        std::cerr << "\nrank " << rank << " (process " << ended << ") " << describe(status)
                  << "; stopping the other " << running() << " ranks" << std::endl;
        return false;
      }
    }
    return true;
  }

  void signal_all(int signal) {
    for (pid_t process : processes_) {
      if (process != 0) kill(process, signal);
    }
  }

  void stop() {
    signal_all(SIGTERM);
    const auto deadline = std::chrono::steady_clock::now() + kGracePeriod;
    while (collect() && std::chrono::steady_clock::now() < deadline) usleep(10'000);
    signal_all(SIGKILL);
    while (collect()) usleep(10'000);
  }

  // Whether ranks are still running.
  bool collect() {
    for (pid_t& process : processes_) {
      if (process != 0 && waitpid(process, nullptr, WNOHANG) == process) process = 0;
    }
    return running() > 0;
  }

  std::vector<pid_t> processes_;  // by rank; 0 once it has ended
};

void check_processes(int64_t ranks) {
  const auto processors = std::max<int64_t>(std::thread::hardware_concurrency(), 1);
  TORCH_CHECK_VALUE(ranks <= kRanksPerProcessor * processors, "--ranks: ", ranks,
                    " processes on this machine, allowed are ", kRanksPerProcessor * processors,
                    ", ", kRanksPerProcessor, " for each of its ", processors, " processors");
}

}  // namespace

std::optional<int> launch_ranks(int64_t ranks, const std::function<void()>& check) {
  if (const char* launcher = std::getenv(kLauncherVariable)) {
    follow_launcher(static_cast<pid_t>(std::atoll(launcher)));
    return std::nullopt;
  }
  if (started_by_another_launcher() || ranks == 1) return std::nullopt;
  check_processes(ranks);
  if (check) check();
  const sigset_t signals = launcher_signals();
  sigprocmask(SIG_BLOCK, &signals, nullptr);
  return LocalJob(ranks).wait();
}

}  // namespace programs
