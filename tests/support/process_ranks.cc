#include "tests/support/process_ranks.h"

#include "tests/support/slowdown.h"

#include <arpa/inet.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>

extern char** environ;

namespace fsdp::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr char kSelector[] = "--child=";

std::map<std::string, std::function<int()>>& child_cases() {
  static std::map<std::string, std::function<int()>> cases;
  return cases;
}

int free_port() {
  const int socket_fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool found = bind(socket_fd, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     getsockname(socket_fd, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  close(socket_fd);
  TORCH_CHECK(found, "no free port on the loopback address: ", std::strerror(errno));
  return ntohs(address.sin_port);
}

// The current environment with `changes` on top, as "NAME=value".
std::vector<std::string> merged_environment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (changes.count(text.substr(0, text.find('='))) == 0) merged.push_back(text);
  }
  for (const auto& [name, value] : changes) merged.push_back(name + "=" + value);
  return merged;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

class Child {
 public:
  Child(const std::string& name, const std::map<std::string, std::string>& environment) {
    std::array<int, 2> ends{};
    TORCH_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0, "pipe: ", std::strerror(errno));
    output_fd_ = ends[0];
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    std::vector<std::string> arguments{"/proc/self/exe", kSelector + name};
    std::vector<std::string> variables = merged_environment(environment);
    const int error = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr,
                                  pointers_to(arguments).data(), pointers_to(variables).data());
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    TORCH_CHECK(error == 0, "posix_spawn: ", std::strerror(error));
  }

  int output_fd() const { return output_fd_; }
  bool open() const { return output_fd_ >= 0; }

  void read_output() {
    std::array<char, 4096> buffer;
    const ssize_t count = read(output_fd_, buffer.data(), buffer.size());
    if (count > 0) {
      end_.output.append(buffer.data(), static_cast<size_t>(count));
    } else {
      close(output_fd_);
      output_fd_ = -1;
    }
  }

  void kill_now() {
    end_.killed_at_deadline = true;
    kill(pid_, SIGKILL);
  }

  ProcessEnd reap() {
    int status = 0;
    waitpid(pid_, &status, 0);
    while (open()) read_output();
    end_.exit_code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return std::move(end_);
  }

 private:
  pid_t pid_ = 0;
  int output_fd_ = -1;
  ProcessEnd end_;
};

// Reads what the children print until all have closed their output; kills those that have
// not at the deadline.
void follow(std::vector<Child>& children, Clock::time_point deadline) {
  for (;;) {
    std::vector<pollfd> waiting;
    for (const Child& child : children) {
      if (child.open()) waiting.push_back({child.output_fd(), POLLIN, 0});
    }
    if (waiting.empty()) return;
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) break;
    poll(waiting.data(), waiting.size(), static_cast<int>(left));
    for (const pollfd& ready : waiting) {
      if (ready.revents == 0) continue;
      auto owner = std::find_if(children.begin(), children.end(),
                                [&](const Child& child) { return child.output_fd() == ready.fd; });
      owner->read_output();
    }
  }
  for (Child& child : children) {
    if (child.open()) child.kill_now();
  }
}

}  // namespace

ChildCase::ChildCase(std::string name, std::function<int()> body) {
  child_cases().emplace(std::move(name), std::move(body));
}

std::optional<int> run_selected_child(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind(kSelector, 0) != 0) continue;
    const auto found = child_cases().find(argument.substr(std::strlen(kSelector)));
    if (found == child_cases().end()) {
      std::fprintf(stderr, "%s: no such child case\n", argument.c_str());
      return 2;
    }
    try {
      return found->second();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      return 1;
    }
  }
  return std::nullopt;
}

std::vector<ProcessEnd> run_processes(const std::string& child, int64_t world_size,
                                      std::chrono::milliseconds deadline,
                                      const std::map<std::string, std::string>& environment) {
  std::map<std::string, std::string> variables = environment;
  variables["WORLD_SIZE"] = std::to_string(world_size);
  variables["MASTER_ADDR"] = "127.0.0.1";
  variables["MASTER_PORT"] = std::to_string(free_port());
  std::vector<Child> children;
  for (int64_t rank = 0; rank < world_size; ++rank) {
    variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
    children.emplace_back(child, variables);
  }
  follow(children, Clock::now() + kSlowdown * deadline);
  std::vector<ProcessEnd> ends;
  for (Child& running : children) ends.push_back(running.reap());
  return ends;
}

}  // namespace fsdp::testing
