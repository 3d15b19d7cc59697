// scenarios.cc: explores scenarios, and prints the sizes of their state spaces.
#include "model/scenarios.h"

#include <chrono>
#include <cstdio>

namespace jax_ring::model {

int run_scenarios(const std::vector<NamedScenario>& scenarios, int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "";
  int num_run = 0;
  std::printf("%-44s %-10s %10s %10s %10s %8s\n", "scenario", "search", "executions", "redundant", "events", "seconds");
  for (const auto& [name, options, scenario] : scenarios) {
    if (name.find(wanted) == std::string::npos) continue;
    ++num_run;
    const auto start = std::chrono::steady_clock::now();
    const Outcome outcome = explore(options, scenario);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const std::string search = !options.exhaustive           ? "random"
                               : options.max_preemptions < 0 ? "exhaustive"
                                                             : std::to_string(options.max_preemptions) + " switches";
    std::printf("%-44s %-10s %10llu %10llu %10llu %8.2f\n", name.c_str(), search.c_str(),
                static_cast<unsigned long long>(outcome.executions), static_cast<unsigned long long>(outcome.redundant),
                static_cast<unsigned long long>(outcome.events), seconds.count());
    std::fflush(stdout);
    if (outcome.failure.empty()) continue;
    std::printf("found: %s\n", outcome.failure.c_str());
    return 1;
  }
  if (num_run > 0) return 0;
  std::printf("no scenario has \"%s\" in its name\n", wanted.c_str());
  return 2;
}

}  // namespace jax_ring::model
