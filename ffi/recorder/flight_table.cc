// flight_table.cc: matches the calls of several processes, and prints each one's progress.
#include "recorder/flight_table.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace jax_ring::flight {
namespace {

constexpr size_t kRows = 10;
constexpr size_t kWidth = 80;  // of a terminal
constexpr size_t kIndent = 6;
constexpr size_t kNamesListed = 8;

// "0, 1, 5-7"
std::string list_of(const std::vector<int64_t>& numbers) {
  std::string text;
  size_t named = 0;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    if (named++ == kNamesListed) return text + ", ...";
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (end - i > 1) text += (end - i == 2 ? ", " : "-") + std::to_string(numbers[end - 1]);
    i = end;
  }
  return text;
}

// The beginning of a part of a sentence.
struct Name {
  const char *one, *several;
  std::string of(const std::vector<int64_t>& numbers) const {
    return std::string(numbers.size() > 1 ? several : one) + " " + list_of(numbers);
  }
};
constexpr Name kProcess{"process", "processes"};
constexpr Name kPosition{"mesh position", "mesh positions"};

enum class Kind { not_in_group, not_made, partial, waiting, done, failed };

// A table's entry for one call in one process, or on one rank.
struct Cell {
  Kind kind = Kind::not_in_group;
  int64_t since = 0;  // when it was entered, or ended
  int arrived = 0, local = 0;

  bool is_like(const Cell& other) const {
    return kind == other.kind && (kind != Kind::partial || arrived == other.arrived);
  }
};

struct Row {
  std::string text;
  int64_t entered;
  int count;                      // number of equal calls
  std::map<int64_t, Cell> cells;  // by process or mesh position
  uint32_t members = 0;           // of a group of several processes: a hash
  size_t num_unknown = 0;         // more ranks, of which nothing is recorded
};

std::string seconds(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f s", static_cast<double>(std::max<int64_t>(nanoseconds, 0)) * 1e-9);
  return text;
}

std::string text_of(const Cell& cell, int64_t now) {
  switch (cell.kind) {
    case Kind::not_in_group:
      return "";
    case Kind::not_made:
      return "NOT MADE";
    case Kind::partial:
      return std::to_string(cell.arrived) + " rank" + (cell.arrived == 1 ? " waits, " : "s wait, ") +
             seconds(now - cell.since);
    case Kind::waiting:
      return "waits, " + seconds(now - cell.since);
    case Kind::done:
      return "done " + seconds(now - cell.since) + " ago";
    case Kind::failed:
      return "failed " + seconds(now - cell.since) + " ago";
  }
  return "";
}

Cell cell_of(const Seen& seen) {
  switch (seen.state) {
    case State::arriving:
      return {Kind::partial, seen.entered, __builtin_popcountll(seen.arrived), 0};
    case State::ready:
      return {Kind::waiting, seen.entered, 0, 0};
    case State::done:
      return {Kind::done, seen.ended, 0, 0};
    case State::failed:
      return {Kind::failed, seen.ended, 0, 0};
  }
  return {};
}

// Relative to the working directory, and shortened in the middle: both ends matter, the kind of the call and its line.
std::string shortened(std::string text, size_t width) {
  std::error_code ignored;
  const std::string folder = " " + (std::filesystem::current_path(ignored) / "").string();
  const size_t found = text.find(folder);
  if (found != std::string::npos) text.erase(found + 1, folder.size() - 1);
  if (text.size() <= width) return text;
  const auto is_inside = [&](size_t at) { return (text[at] & 0xc0) == 0x80; };  // a UTF-8 character
  size_t head = width / 2, tail = text.size() - (width - head - 3);
  while (head > 0 && is_inside(head)) --head;
  while (tail < text.size() && is_inside(tail)) ++tail;
  return text.substr(0, head) + "..." + text.substr(tail);
}

bool all_done(const Row& row) {
  return std::all_of(row.cells.begin(), row.cells.end(), [](const auto& cell) {
    return cell.second.kind == Kind::done || cell.second.kind == Kind::not_in_group;
  });
}

// The latest rows, the last one at the end. Equal calls that all have completed are one row, the last of them.
std::vector<Row> latest_of(std::vector<Row> rows) {
  std::vector<Row> kept;  // the last one first
  for (auto row = rows.rbegin(); row != rows.rend(); ++row) {
    const auto is_like = [&](const Row& other) {
      return other.text == row->text && all_done(other) && all_done(*row) &&
             std::equal(row->cells.begin(), row->cells.end(), other.cells.begin(), other.cells.end(),
                        [](const auto& a, const auto& b) { return a.first == b.first && a.second.is_like(b.second); });
    };
    const auto found = std::find_if(kept.begin(), kept.end(), is_like);
    if (found != kept.end()) {
      found->count += row->count;
    } else if (kept.size() < kRows) {
      kept.push_back(std::move(*row));
    }
  }
  std::reverse(kept.begin(), kept.end());
  return kept;
}

// "processes 0, 1: waits, 3.000 s; process 2: NOT MADE", in lines that fit the terminal.
std::string states_of(const Row& row, Name name_of, int64_t now) {
  std::vector<std::pair<Cell, std::vector<int64_t>>> parts;  // with the names that share each state
  for (const auto& [name, cell] : row.cells) {
    if (cell.kind == Kind::not_in_group) continue;
    const auto alike = std::find_if(parts.begin(), parts.end(),
                                    [&, &cell = cell](const auto& part) { return part.first.is_like(cell); });
    if (alike == parts.end()) {
      parts.push_back({cell, {name}});
    } else {
      alike->second.push_back(name);
    }
  }
  std::string text, line;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part =
        name_of.of(parts[i].second) + ": " + text_of(parts[i].first, now) + (i + 1 < parts.size() ? ";" : "");
    if (!line.empty() && kIndent + line.size() + 1 + part.size() > kWidth) {
      text += std::string(kIndent, ' ') + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + part;
  }
  return text + std::string(kIndent, ' ') + line + "\n";
}

std::string print(std::vector<Row> rows, Name name_of, int64_t now) {
  std::stable_sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.entered < b.entered; });
  rows = latest_of(std::move(rows));
  if (rows.empty()) return "jax_ring: no calls are recorded.\n";
  std::string text = "jax_ring: the last calls (> = not completed by everyone):\n";
  for (const Row& row : rows) {
    const std::string times = row.count > 1 ? std::to_string(row.count) + " times " : "";
    text += (all_done(row) ? "  " : "> ") + times + shortened(row.text, kWidth - 2 - times.size()) + "\n" +
            states_of(row, name_of, now);
    if (row.num_unknown > 0 && !all_done(row)) {
      text += std::string(kIndent, ' ') + "the ranks from " + std::to_string(kRanksInMask) + " on are not recorded\n";
    }
  }
  return text;
}

// A process's newest record that shows where it is: an open one if there is one.
const Seen* latest(const std::vector<Seen>& records) {
  const Seen* found = nullptr;
  for (const Seen& seen : records) {
    const bool is_open = seen.state == State::arriving || seen.state == State::ready;
    const bool found_open = found != nullptr && (found->state == State::arriving || found->state == State::ready);
    if (found == nullptr || is_open || !found_open) found = &seen;
  }
  return found;
}

std::string sentence_of(const Cell& cell, const std::string& text, int64_t now) {
  const std::string passed = seconds(now - cell.since);
  switch (cell.kind) {
    case Kind::partial:
      return std::to_string(cell.arrived) + (cell.arrived == 1 ? " rank waits in " : " ranks wait in ") + text +
             ", for " + passed;
    case Kind::waiting:
      return "waiting in " + text + ", for " + passed;
    case Kind::failed:
      return "failed in " + text + ", " + passed + " ago";
    default:
      return "no call since " + text + " was done, " + passed + " ago";
  }
}

// " Last calls: processes 0, 1: ...; process 2: ...": processes in the same call share a part, with the first one's
// time.
std::string sentence(const std::map<int64_t, std::pair<Cell, std::string>>& latest_calls, Name name_of, int64_t now) {
  struct Part {
    Cell cell;
    std::string text;
    std::vector<int64_t> names;
  };
  std::vector<Part> parts;
  for (const auto& [name, call] : latest_calls) {
    const auto alike = std::find_if(parts.begin(), parts.end(), [&, &call = call](const Part& part) {
      return part.cell.is_like(call.first) && part.text == call.second;
    });
    if (alike == parts.end()) {
      parts.push_back({call.first, call.second, {name}});
    } else {
      alike->names.push_back(name);
    }
  }
  std::string text;
  for (const Part& part : parts) {
    text += (text.empty() ? " Last calls: " : "; ") + name_of.of(part.names) + ": " +
            sentence_of(part.cell, part.text, now);
  }
  return text.empty() ? "" : text + ".";
}

}  // namespace

int64_t nanoseconds_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::string table_of_processes(const std::vector<Snapshot>& snapshots, int64_t now) {
  std::vector<Row> rows;
  std::map<uint64_t, size_t> by_id;
  std::map<uint32_t, std::set<int64_t>> members;  // the processes that made calls in a group
  std::map<int64_t, int64_t> oldest;              // earlier records have been overwritten
  std::vector<std::pair<int64_t, const Seen*>> without_id;
  const auto add = [&](size_t at, int64_t process, const Seen& seen) {
    if (at == rows.size()) rows.push_back({seen.text, seen.entered, 1, {}, seen.members});
    rows[at].cells[process] = cell_of(seen);
    rows[at].entered = std::min(rows[at].entered, seen.entered);
  };
  const auto lacks = [&](const Row& row, int64_t process) {
    return row.cells.count(process) == 0 && oldest[process] < row.entered;
  };
  for (const Snapshot& snapshot : snapshots) {
    if (!snapshot.records.empty()) oldest[snapshot.process] = snapshot.records.front().entered;
    for (const Seen& seen : snapshot.records) {
      if (seen.members != 0) members[seen.members].insert(snapshot.process);
      if (seen.id != 0) {
        add(by_id.try_emplace(seen.id, rows.size()).first->second, snapshot.process, seen);
      } else if (seen.members != 0) {
        without_id.emplace_back(snapshot.process, &seen);
      } else if (seen.state != State::done || snapshots.size() == 1) {
        add(rows.size(), snapshot.process, seen);
      }
    }
  }
  // Not all ranks of the process have made these, the last ones of the group that it lacks.
  for (auto call = without_id.rbegin(); call != without_id.rend(); ++call) {
    const int64_t process = call->first;
    const Seen& seen = *call->second;
    const bool is_first = oldest[process] == seen.entered;
    const auto found = std::find_if(rows.rbegin(), rows.rend(), [&](const Row& row) {
      return row.members == seen.members && row.text == seen.text &&
             (lacks(row, process) || (is_first && row.cells.count(process) == 0));
    });
    add(found == rows.rend() ? rows.size() : rows.rend() - found - 1, process, seen);
  }
  for (Row& row : rows) {
    for (int64_t process : members[row.members]) {
      if (lacks(row, process)) row.cells[process] = {Kind::not_made, 0, 0, 0};
    }
  }
  return print(std::move(rows), kProcess, now);
}

std::string table_of_ranks() {
  const Snapshot own = Recorder::instance().read_own();
  const std::vector<RecordedCall*> calls = Recorder::instance().calls();
  std::vector<Row> rows;
  for (const Seen& seen : own.records) {
    if (seen.call >= calls.size() || seen.group >= calls[seen.call]->groups.size()) continue;
    Row row{seen.text, seen.entered, 1, {}};
    const auto& [members, processes] = calls[seen.call]->groups[seen.group];
    row.num_unknown = members.size() - std::min(members.size(), kRanksInMask);
    for (size_t rank = 0; rank < members.size() - row.num_unknown; ++rank) {
      if (seen.members != 0 && processes[rank] != own.process) continue;
      Cell cell = cell_of(seen);
      const bool has_arrived = (seen.arrived >> rank & 1) != 0;
      if (seen.state == State::arriving) cell.kind = has_arrived ? Kind::waiting : Kind::not_made;
      if (seen.state == State::failed && !has_arrived) cell.kind = Kind::not_made;
      row.cells[members[rank]] = cell;
    }
    rows.push_back(std::move(row));
  }
  return print(std::move(rows), kPosition, nanoseconds_now());
}

std::string last_calls_of_processes(const std::vector<Snapshot>& snapshots, int64_t now) {
  std::map<int64_t, std::pair<Cell, std::string>> calls;
  for (const Snapshot& snapshot : snapshots) {
    if (const Seen* seen = latest(snapshot.records)) calls[snapshot.process] = {cell_of(*seen), seen->text};
  }
  return sentence(calls, kProcess, now);
}

std::string last_calls_of_missing_ranks(const Entry& entry) {
  if (!entry) return "";
  const Snapshot own = Recorder::instance().read_own();
  const std::vector<RecordedCall*> calls = Recorder::instance().calls();
  std::map<int64_t, std::pair<Cell, std::string>> latest_calls;
  for (const Seen& seen : own.records) {
    if (seen.members != 0 || seen.call >= calls.size() || seen.group >= calls[seen.call]->groups.size()) continue;
    const std::vector<int64_t>& members = calls[seen.call]->groups[seen.group].positions;
    for (size_t rank = 0; rank < std::min(members.size(), kRanksInMask); ++rank) {
      if ((seen.arrived >> rank & 1) == 0) continue;
      Cell cell = cell_of(seen);
      if (cell.kind == Kind::partial) cell.kind = Kind::waiting;
      latest_calls[members[rank]] = {cell, seen.text};
    }
  }
  const std::vector<int64_t>& members = entry.call().groups[entry.group()].positions;
  for (auto call = latest_calls.begin(); call != latest_calls.end();) {
    const auto found = std::find(members.begin(), members.end(), call->first);
    const auto rank = static_cast<size_t>(found - members.begin());
    const bool is_missing = found != members.end() && rank < kRanksInMask && !entry.has_arrived(static_cast<int>(rank));
    const bool waits = call->second.first.kind == Kind::waiting;
    call = is_missing && !waits ? std::next(call) : latest_calls.erase(call);
  }
  return sentence(latest_calls, kPosition, nanoseconds_now());
}

std::string table_of_everything() {
  const std::vector<Snapshot> snapshots = Recorder::instance().read();
  return snapshots.size() > 1 ? table_of_processes(snapshots, nanoseconds_now()) : table_of_ranks();
}

std::vector<std::tuple<int64_t, std::string, std::string>> tables_of_host(bool of_all_users) {
  std::map<std::tuple<int64_t, uint64_t, int64_t>, std::vector<std::pair<int64_t, Snapshot>>> jobs;
  for (auto& [pid, snapshot] : Recorder::read_host(of_all_users)) {
    if (snapshot.records.empty()) continue;
    // A process without peers is a job of its own. Nobody joins the job of another user.
    jobs[{snapshot.user, snapshot.job, snapshot.job == 0 ? pid : 0}].emplace_back(pid, std::move(snapshot));
  }
  std::vector<std::tuple<int64_t, std::string, std::string>> tables;
  for (auto& [job, members] : jobs) {
    std::sort(members.begin(), members.end(),
              [](const auto& a, const auto& b) { return a.second.process < b.second.process; });
    std::string pids;
    std::vector<Snapshot> snapshots;
    for (auto& [pid, snapshot] : members) {
      pids += (pids.empty() ? "" : ", ") + std::to_string(snapshot.process) + ": pid " + std::to_string(pid);
      snapshots.push_back(std::move(snapshot));
    }
    tables.emplace_back(std::get<0>(job), pids, table_of_processes(snapshots, nanoseconds_now()));
  }
  return tables;
}

}  // namespace jax_ring::flight
