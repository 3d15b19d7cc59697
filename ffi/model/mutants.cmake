# Weakenings of the protocols. The model must find each of them.
#
#   jax_ring_mutant(model name file from to scenario expected)

# The algorithms of the GPU engine: memory orders and fences.
jax_ring_mutant(device_model post_relaxed device/memory/memory.h
  [==[store(value, cuda::memory_order_release)]==] [==[store(value, cuda::memory_order_relaxed)]==]
  "two-shot, 2 ranks x 1" "data race")
jax_ring_mutant(device_model load_relaxed device/memory/memory.h
  [==[load(cuda::memory_order_acquire)]==] [==[load(cuda::memory_order_relaxed)]==]
  "order of ranks, 2 ranks x 1" "data race")
jax_ring_mutant(device_model two_shot_post_without_sync device/two_shot.h
  [==[    team.sync();
    JAX_RING_NO_UNROLL]==] [==[]==]
  "two-shot, 2 ranks x 2" "data race")
jax_ring_mutant(device_model two_shot_wait_without_all device/two_shot.h
  [==[return team.all(ok);]==] [==[return ok;]==]
  "two-shot, 2 ranks x 2" "data race")
jax_ring_mutant(device_model ring_finish_without_sync device/ring.h
  [==[    team.sync();
    sent += sends;]==] [==[    sent += sends;]==]
  "order of ranks, 2 ranks x 2" "data race")

# One-shot: lines and their tags.
jax_ring_mutant(device_model one_shot_without_all device/one_shot.h
  [==[    ok = team.all(ok);]==] [==[]==]
  "one-shot, 3 ranks x 3" "(wrong result|deadlock|two threads)")
jax_ring_mutant(device_model one_shot_one_set device/one_shot.h
  [==[static_cast<int>(epoch % 2)]==] [==[0]==]
  "one-shot, 2 ranks x 1" "(wrong result|deadlock)")
jax_ring_mutant(device_model one_shot_without_sweep device/one_shot.h
  [==[if (pack_of_line(swept) >= terms.num_slots() * range.size())]==] [==[if (false)]==]
  "one-shot after" "wrong result")
jax_ring_mutant(device_model one_shot_half_a_tag device/one_shot.h
  [==[return line.word[0] >> 32 == tag && line.word[1] >> 32 == tag;]==] [==[return line.word[0] >> 32 == tag;]==]
  "one-shot, 2 ranks x 1" "(wrong result|a rank has failed)")
jax_ring_mutant(device_model one_shot_without_header device/one_shot.h
  [==[data_of(header) != message.fingerprint]==] [==[false]==]
  "different calls" "a mismatch was not reported")

# Two-shot: rounds and their flags.
jax_ring_mutant(device_model two_shot_without_fingerprint device/memory/signal.h
  [==[if (seen == expected) return true;]==] [==[return true;]==]
  "different calls" "a mismatch was not reported")
jax_ring_mutant(device_model two_shot_scatters_a_round_early device/memory/mailbox.h
  [==[constexpr int kScatterBuffers = 3;]==] [==[constexpr int kScatterBuffers = 2;]==]
  "two-shot, 2 ranks x 1" "data race")
jax_ring_mutant(device_model two_shot_gathers_a_round_early device/memory/mailbox.h
  [==[constexpr int kGatherBuffers = 2;]==] [==[constexpr int kGatherBuffers = 1;]==]
  "two-shot, 2 ranks x 1" "data race")
jax_ring_mutant(device_model two_shot_one_flag device/two_shot.h
  [==[return number % 2 == 0 ? FlagKind::even : FlagKind::odd;]==] [==[return FlagKind::even;]==]
  "two-shot, 2 ranks x 1" "deadlock")
jax_ring_mutant(device_model two_shot_copies_a_step_early device/two_shot.h
  [==[if (step > 1) copy_results(worker, step - 2);]==]
  [==[if (step > 0 && step <= num_rounds) copy_results(worker, step - 1);]==]
  "two-shot, 2 ranks x 1" "(data race|wrong result)")
jax_ring_mutant(device_model two_shot_round_forgotten device/two_shot.h
  [==[if (ok && team.thread() == 0) progress.round = number;]==] [==[]==]
  "two-shot, 2 ranks x 1" "a rank has failed")

# Exchanges: the steps of two-shot, without results to send.
jax_ring_mutant(device_model exchange_sends_a_round_early device/memory/mailbox.h
  [==[constexpr int kScatterBuffers = 3;]==] [==[constexpr int kScatterBuffers = 2;]==]
  "exchanges, 2 ranks x 1" "data race")
jax_ring_mutant(device_model exchange_keeps_a_step_early device/two_shot.h
  [==[keep_received(worker, step - 1);]==] [==[keep_received(worker, step < num_rounds ? step : step - 1);]==]
  "exchanges, 2 ranks x 1" "(data race|wrong result)")
jax_ring_mutant(device_model permutation_without_its_step device/two_shot.h
  [==[if (step > 0) ok = worker.await_peers(]==]
  [==[if (step > 0 && plan.collective != Collective::permute) ok = worker.await_peers(]==]
  "exchanges, 2 ranks x 1" "(data race|wrong result)")
jax_ring_mutant(device_model permutation_without_zeros device/two_shot.h
  [==[if (source == kNoRank) return fill(worker.message, range, 0, worker.team, Pack{});]==]
  [==[if (source == kNoRank) return;]==]
  "exchanges, 2 ranks x 1" "wrong result")

# Multicast: the steps of two-shot.
jax_ring_mutant(device_model multicast_two_shot_stores_to_one_buffer device/two_shot.h
  [==[return store_to_all(self, buffer + place]==] [==[return store_to_all(self, gather_offset(0, self.rank) + place]==]
  "multicast and two-shot, 2 ranks x 1" "(data race|wrong result)")
jax_ring_mutant(device_model multicast_sums_unawaited device/multicast.h
  [==[if (step > 0) ok = worker.await_peers(]==] [==[if (step > 1) ok = worker.await_peers(]==]
  "multicast, 2 ranks x 1" "(data race|deadlock)")
jax_ring_mutant(device_model multicast_copies_a_step_early device/multicast.h
  [==[if (step > 1) copy_round(worker, step - 2);]==]
  [==[if (step > 0 && step <= num_rounds) copy_round(worker, step - 1);]==]
  "multicast, 2 ranks x 1" "(data race|wrong result)")
jax_ring_mutant(device_model multicast_stages_a_round_early device/multicast.h
  [==[worker.scatter_buffer(worker.self.rank, round, 0)]==] [==[worker.scatter_buffer(worker.self.rank, round / 3 * 3, 0)]==]
  "multicast, 2 ranks x 1" "(data race|wrong result)")
jax_ring_mutant(device_model multicast_one_gather_buffer device/multicast.h
  [==[static_cast<int>(round % kGatherBuffers), worker.cta, 0) + first;]==]
  [==[static_cast<int>(round % 1), worker.cta, 0) + first;]==]
  "multicast, 2 ranks x 1" "(data race|wrong result)")
jax_ring_mutant(device_model multicast_round_forgotten device/multicast.h
  [==[if (ok && team.thread() == 0) progress.round = number;]==] [==[]==]
  "multicast, 2 ranks x 1" "a rank has failed")

# The ring: slots, heads and tails.
jax_ring_mutant(device_model ring_slot_too_many device/ring.h
  [==[const uint32_t needed = sent + 1 - ]==] [==[const uint32_t needed = sent - ]==]
  "a call, 3 ranks x 1" "data race")
jax_ring_mutant(device_model ring_head_before_read device/ring.h
  [==[  const Pack* in = link.incoming();]==]
  [==[  if (hop.receives() && link.team.thread() == 0) {
    post_flag(link.self.flag(link.previous(), FlagKind::head, link.cta, 0), link.received + 1);
  }
  const Pack* in = link.incoming();]==]
  "a call, 3 ranks x 1" "data race")
jax_ring_mutant(device_model ring_tail_before_data device/ring.h
  [==[  const Pack* in = link.incoming();]==]
  [==[  if (hop.sends() && link.team.thread() == 0) {
    post_flag(link.self.flag(link.next(), FlagKind::tail, link.cta, 0), link.sent + 1);
  }
  const Pack* in = link.incoming();]==]
  "order of ranks, 2 ranks x 1" "data race")
jax_ring_mutant(device_model ring_without_fingerprint device/ring.h
  [==[if (ok && read_word(slot(self.rank, received)->word) != fingerprint)]==] [==[if (false)]==]
  "different calls" "a mismatch was not reported")
jax_ring_mutant(device_model ring_compares_without_wrap device/memory/signal.h
  [==[return static_cast<int32_t>(a - b) < 0;]==] [==[return a < b;]==]
  "order of ranks, 2 ranks x 1" "(data race|deadlock)")

# The rounds of a group of processes.
jax_ring_mutant(shm_model doorbell_relaxed shm/exchange/channel.cc
  [==[.load(std::memory_order_relaxed) + 1, std::memory_order_release)]==]
  [==[.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed)]==]
  "one round in one step" "deadlock")
jax_ring_mutant(shm_model ringer_publishes_no_doorbell shm/exchange/channel.cc
  [==[waiters.fetch_add(0, std::memory_order_acq_rel)]==] [==[waiters.fetch_add(0, std::memory_order_relaxed)]==]
  "one round in one step" "deadlock")
jax_ring_mutant(shm_model ringer_sees_no_waiter shm/exchange/channel.cc
  [==[waiters.fetch_add(0, std::memory_order_acq_rel)]==] [==[waiters.load(std::memory_order_seq_cst)]==]
  "one round in one step" "deadlock")
jax_ring_mutant(shm_model waits_without_announcement shm/exchange/channel.cc
  [==[  other.notices.waiters.fetch_add(1, std::memory_order_acq_rel);
  futex_wait(other.signals.doorbell, seen, timeout);]==]
  [==[  futex_wait(other.signals.doorbell, seen, timeout);
  other.notices.waiters.fetch_add(1, std::memory_order_acq_rel);]==]
  "one round in one step" "deadlock")
jax_ring_mutant(shm_model call_published_relaxed shm/exchange/channel.cc
  [==[signals.calls[round % 2].store(call << 1 | growth, std::memory_order_release)]==]
  [==[signals.calls[round % 2].store(call << 1 | growth, std::memory_order_relaxed)]==]
  "another order of calls, 2" "(data race|wrong result)")
jax_ring_mutant(shm_model call_read_relaxed shm/exchange/channel.cc
  [==[return signals.calls[round % 2].load(std::memory_order_acquire)]==]
  [==[return signals.calls[round % 2].load(std::memory_order_relaxed)]==]
  "another order of calls, 2" "(data race|wrong result)")
jax_ring_mutant(shm_model any_call_will_do shm/exchange/channel.cc
  [==[return staged_word(process, round) == (call << 1 | growth);]==]
  [==[return staged_word(process, round).has_value();]==]
  "another order of calls, 2" "(data race|deadlock|wrong result|no such segment)")
jax_ring_mutant(shm_model results_published_relaxed shm/exchange/channel.cc
  [==[  area(self_).signals.results.store(round, std::memory_order_release);
  ring_doorbell();]==] [==[  area(self_).signals.results.store(round, std::memory_order_relaxed);
  ring_doorbell();]==]
  "one round in two steps" "data race")
jax_ring_mutant(shm_model results_published_first shm/exchange/exchange.cc
  [==[        fold(channel, number, round_);
        if (rounds_.publishes_results()) {
          channel.signal_results(number);]==]
  [==[        if (rounds_.publishes_results()) channel.signal_results(number);
        fold(channel, number, round_);
        if (rounds_.publishes_results()) {]==]
  "one round in two steps" "data race")
jax_ring_mutant(shm_model one_set shm/exchange/channel.h
  [==[round % 2 * (capacity().staging + capacity().results)]==] [==[0 * round]==]
  "2 rounds in one step" "data race")
jax_ring_mutant(shm_model compares_without_wrap shm/exchange/channel.h
  [==[return static_cast<int32_t>(a - b) < 0;]==] [==[return a < b;]==]
  "2 rounds in one step" "(data race|deadlock|wrong result)")

jax_ring_mutant(shm_model all_to_all_in_one_set shm/exchange/channel.h
  [==[round % 2 * (capacity().staging + capacity().results)]==] [==[0 * round]==]
  "an all-to-all" "data race")
jax_ring_mutant(shm_model slices_in_one_set shm/exchange/channel.h
  [==[round % 2 * (capacity().staging + capacity().results)]==] [==[0 * round]==]
  "a ragged all-to-all" "data race")
jax_ring_mutant(shm_model permutation_without_zeros shm/exchange/exchange.cc
  [==[if (receives == (part.sources.count > 0)) continue;]==] [==[if (receives) continue;]==]
  "a permutation" "wrong result")

jax_ring_mutant(shm_model results_skipped_relaxed shm/exchange/channel.cc
  [==[results.store(round, std::memory_order_release); }]==] [==[results.store(round, std::memory_order_relaxed); }]==]
  "calls of every kind" "data race")
jax_ring_mutant(shm_model skips_results_too_early shm/exchange/exchange.cc
  [==[channel.skip_results(number - 1);]==] [==[channel.skip_results(number);]==]
  "one round in two steps" "(data race|wrong result)")
jax_ring_mutant(shm_model tiny_values_in_one_place shm/exchange/channel.h
  [==[signals.tiny[round % 2]]==] [==[signals.tiny[0]]==]
  "tiny rounds" "(data race|wrong result)")

# The end of a group.
jax_ring_mutant(shm_model abort_published_relaxed shm/exchange/channel.cc
  [==[of_abort.store(1, std::memory_order_release)]==] [==[of_abort.store(1, std::memory_order_relaxed)]==]
  "an abort" "a notice came before")
jax_ring_mutant(shm_model abort_rings_nobody shm/exchange/channel.cc
  [==[  ring_doorbell();
  unlink_offer();  // the leader may be dead]==] [==[  unlink_offer();  // the leader may be dead]==]
  "an abort" "deadlock")

# The growth of a group's memory.
jax_ring_mutant(shm_model grows_before_all_have_mapped shm/exchange/exchange.cc
  [==[      case Step::await_growth:
        if (!have_all_arrived(channel, number)) return State::waiting;]==] [==[      case Step::await_growth:]==]
  "growth, 2 processes" "(data race|deadlock|wrong result|no such segment)")
jax_ring_mutant(shm_model grows_without_asking_all shm/exchange/channel.cc
  [==[have_all = have_all && area(process)]==] [==[have_all = (have_all && self_ == 0) || area(process)]==]
  "growth that a process refuses" "(data race|deadlock|wrong result)")
jax_ring_mutant(shm_model offers_too_late shm/exchange/exchange.cc
  [==[  if (!channel.offer_growth(wanted)) return begin_rounds(channel), false;
  channel.signal_staged(number, call_.id, true);]==]
  [==[  channel.signal_staged(number, call_.id, true);
  channel.offer_growth(wanted);]==]
  "growth, 2 processes" "(data race|deadlock|wrong result|no such segment)")
jax_ring_mutant(shm_model maps_after_signaling shm/exchange/exchange.cc
  [==[  channel.accept_growth();
  channel.signal_staged(number, call_.id, true);]==]
  [==[  channel.signal_staged(number, call_.id, true);
  channel.accept_growth();]==]
  "growth, 2 processes" "(data race|deadlock|wrong result|no such segment)")
jax_ring_mutant(shm_model growth_is_like_any_round shm/exchange/channel.cc
  [==[return staged_word(process, round) == (call << 1 | growth);]==]
  [==[return staged_call(process, round) == call;]==]
  "growth, 2 processes" "(data race|deadlock|wrong result|no such segment)")
jax_ring_mutant(shm_model releases_without_saying_so shm/exchange/channel.cc
  [==[    has_retired_ = true;]==] [==[]==]
  "growth and idle times, 2" "(data race|deadlock|wrong result)")

# The rendezvous of the ranks of a process, and the relay of completions.
jax_ring_mutant(cpu_model error_lost cpu/rendezvous/completion_threads.cc
  [==[  pending.error = std::move(error);]==] [==[  pending.error = nullptr;]==]
  "2 ranks, 2 calls, a failure" "(wrong result|data race)")
jax_ring_mutant(cpu_model idle_workers_miscounted cpu/rendezvous/completion_threads.cc
  [==[    --idle_workers_;]==] [==[]==]
  "completions that block" "(deadlock|livelock)")
jax_ring_mutant(cpu_model completion_under_the_lock cpu/rendezvous/completion_threads.cc
  [==[    lock.unlock();
    run_completion(*pending.rendezvous, rank, pending.error.get());
    lock.lock();]==]
  [==[    run_completion(*pending.rendezvous, rank, pending.error.get());]==]
  "2 ranks, 3 calls" "deadlock")
jax_ring_mutant(cpu_model slow_completions_unnoticed cpu/rendezvous/completion_threads.cc
  [==[      pending.fan_out = true;]==] [==[]==]
  "2 ranks, completions that block" "(deadlock|livelock)")
jax_ring_mutant(cpu_model lone_ranks_unwatched cpu/rendezvous/completion_threads.cc
  [==[num_completions > 1 || !has_worker;]==] [==[num_completions > 1;]==]
  "lone ranks" "(deadlock|livelock)")
jax_ring_mutant(cpu_model watcher_sleeps_on cpu/rendezvous/completion_threads.cc
  [==[    watcher_asleep_ = false;
    watcher_wake_.notify_one();]==] [==[    watcher_asleep_ = false;]==]
  "a pause" "deadlock")
jax_ring_mutant(cpu_model failure_checked_before_the_lock cpu/rendezvous/rendezvous.cc
  [==[  std::unique_lock<Mutex> lock(mutex_);
  // Check under the lock: the watchdog either finds this rendezvous in the map, or recorded the failure before.
  if (const CallFailurePtr failure = Watchdog::instance().failure(run_id, this)) {]==]
  [==[  const CallFailurePtr failure = Watchdog::instance().failure(run_id, this);
  std::unique_lock<Mutex> lock(mutex_);
  if (failure) {]==]
  "2 ranks, 2 calls, a failure" "deadlock")

# Ranks that wait in their calls.
jax_ring_mutant(cpu_model rank_released_twice cpu/rendezvous/completion_threads.cc
  [==[    rendezvous.done[rank] = Completion();]==] [==[]==]
  "2 ranks that wait, a call" "a call completed 2 times")
jax_ring_mutant(cpu_model rank_that_left_forgotten cpu/rendezvous/completion_threads.cc
  [==[    if (released == WaitingRank::Released::has_left) continue;]==] [==[]==]
  "2 ranks that wait, a call" "(deadlock|livelock|a call completed 0 times)")
jax_ring_mutant(cpu_model release_relaxed cpu/waiting/waiting_rank.cc
  [==[state_.exchange(State::released, std::memory_order_acq_rel)]==]
  [==[state_.exchange(State::released, std::memory_order_relaxed)]==]
  "2 ranks that wait, a call" "data race")
jax_ring_mutant(cpu_model offer_relaxed cpu/waiting/waiting_rank.cc
  [==[compare_exchange_strong(seen, State::offered, std::memory_order_acq_rel)]==]
  [==[compare_exchange_strong(seen, State::offered, std::memory_order_relaxed)]==]
  "2 ranks that wait, a call" "data race")
jax_ring_mutant(cpu_model ranks_leave_unheard cpu/waiting/waiting_rank.cc
  [==[has_changed ? State::working : State::left]==] [==[has_changed ? State::working : State::waiting]==]
  "2 ranks that wait, a call" "(deadlock|livelock|a call completed 0 times)")

# Ranks that wait on threads of the pool.
jax_ring_mutant(cpu_model move_relaxed cpu/waiting/waiting_rank.cc
  [==[state_.compare_exchange_strong(seen, State::movable, std::memory_order_acq_rel)]==]
  [==[state_.compare_exchange_strong(seen, State::movable, std::memory_order_relaxed)]==]
  "2 ranks that move, a call" "data race")
jax_ring_mutant(cpu_model pool_relaxed cpu/waiting/waiting_rank.cc
  [==[  State seen = state_.load(std::memory_order_acquire);
  if (seen == State::skipped) return false;
  if (seen == State::moving && state_.compare_exchange_strong(seen, State::waiting, std::memory_order_acq_rel)) {
    seen = State::waiting;
  }
  if (seen == State::movable && state_.compare_exchange_strong(seen, State::released, std::memory_order_acq_rel)) {]==]
  [==[  State seen = state_.load(std::memory_order_relaxed);
  if (seen == State::skipped) return false;
  if (seen == State::moving && state_.compare_exchange_strong(seen, State::waiting, std::memory_order_relaxed)) {
    seen = State::waiting;
  }
  if (seen == State::movable && state_.compare_exchange_strong(seen, State::released, std::memory_order_relaxed)) {]==]
  "2 ranks that move, a call" "data race")
jax_ring_mutant(cpu_model moving_rank_goes_on cpu/waiting/waiting_rank.cc
  [==[return Released::moves;]==] [==[return Released::goes_on;]==]
  "a busy pool, a call" "deadlock")
jax_ring_mutant(cpu_model moving_rank_has_left cpu/rendezvous/completion_threads.cc
  [==[    if (released == WaitingRank::Released::moves) continue;
    rendezvous.waiting[rank] = nullptr;
    if (released == WaitingRank::Released::has_left) continue;]==]
  [==[    rendezvous.waiting[rank] = nullptr;
    if (released != WaitingRank::Released::goes_on) continue;]==]
  "2 ranks that move, a call" "a call completed 2 times")
jax_ring_mutant(cpu_model move_unnoticed cpu/waiting/waiting_rank.cc
  [==[if (terms_.moves && state_]==] [==[if (false && state_]==]
  "a busy pool, a call" "deadlock")
jax_ring_mutant(cpu_model taken_over_at_once cpu/waiting/waiting_rank.cc
  [==[return state_.load(std::memory_order_acquire) != State::released;]==] [==[return true;]==]
  "2 ranks that move, a call" "a call completed 2 times")
jax_ring_mutant(cpu_model taken_over_unheard cpu/waiting/waiting_rank.cc
  [==[if (state_.compare_exchange_strong(seen, State::taken, std::memory_order_acq_rel)) return true;]==]
  [==[if (state_.load(std::memory_order_acquire) == seen) return true;]==]
  "2 ranks that move, a call" "a call completed 2 times")
jax_ring_mutant(cpu_model movable_rank_not_taken_over cpu/waiting/waiting_rank.cc
  [==[{State::movable, State::moving}]==] [==[{State::moving}]==]
  "2 ranks that move, a call" "a call completed 2 times")
jax_ring_mutant(cpu_model pool_takes_what_is_taken cpu/waiting/waiting_rank.cc
  [==[seen == State::movable && state_.compare_exchange_strong(seen, State::released, std::memory_order_acq_rel)]==]
  [==[seen == State::movable && (state_.exchange(State::released, std::memory_order_acq_rel), true)]==]
  "2 ranks that move, a call" "a call completed 2 times")
jax_ring_mutant(cpu_model pool_takes_what_was_taken cpu/waiting/waiting_rank.cc
  [==[  if (seen == State::taken) return false;]==] [==[  if (seen == State::taken) return true;]==]
  "2 ranks that move, a call" "a call completed 2 times")
jax_ring_mutant(cpu_model pool_forgets_what_it_takes cpu/waiting/waiting_rank.cc
  [==[    return true;
  }
  if (seen == State::taken)]==] [==[    return false;
  }
  if (seen == State::taken)]==]
  "2 ranks that move, a call" "(deadlock|a call completed 0 times)")
jax_ring_mutant(cpu_model moved_ranks_of_the_call_before cpu/rendezvous/rendezvous.cc
  [==[  waiting.clear();]==] [==[]==]
  "3 ranks that move and share, 2 calls" "(deadlock|a call completed 0 times)")
