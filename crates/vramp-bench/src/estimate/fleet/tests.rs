//! The short forms against closed forms, bounds that no schedule beats, and a simulation event by event.

use proptest::prelude::*;

use super::*;

const GB: f64 = 1e9;

/// 140 GB on hosts of eight GPUs, with links that are never the limit.
fn fleet(hosts: u64) -> Fleet {
    Fleet {
        hosts,
        bytes: 140_000_000_000,
        chunk_bytes: 1_000_000,
        gpus: 8,
        gpu_link: 1e6 * GB,
        gpu_copies: false,
        nic: 10.0 * GB,
        shared: Some(Storage { per_host: 5.0 * GB, total: 20.0 * GB }),
        object: None,
        nvme: Some(Drives { read: 7.0 * GB, write: 5.0 * GB }),
    }
}

fn seconds(fleet: &Fleet, way: Way) -> f64 {
    simulate(fleet).iter().find(|outcome| outcome.way == way).unwrap().seconds
}

fn limit(fleet: &Fleet, way: Way) -> Limit {
    simulate(fleet).iter().find(|outcome| outcome.way == way).unwrap().limit
}

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-3 * b.abs()
}

/// When the last chunk reaches the last node of a tree, event by event: node `i` has the children `d i + 1 ..= d i + d`; chunk
/// `j` reaches the root after `(j + 1) feed` seconds; a node sends chunks in order, each to its children in order, one
/// transfer of `send` seconds at a time.
fn last_arrival(nodes: usize, children: usize, chunks: usize, feed: f64, send: f64) -> f64 {
    let mut arrivals = vec![vec![0.0; chunks]; nodes];
    arrivals[0] = (1..=chunks).map(|chunk| chunk as f64 * feed).collect();
    for node in 0..nodes {
        let mut free = 0.0_f64;
        for (chunk, there) in arrivals[node].clone().into_iter().enumerate() {
            for child in (children * node + 1..=children * node + children).filter(|&child| child < nodes) {
                free = free.max(there) + send;
                arrivals[child][chunk] = free;
            }
        }
    }
    arrivals.iter().map(|chunks| *chunks.last().unwrap()).fold(0.0, f64::max)
}

#[test]
fn direct_reads_are_the_closed_form() {
    for hosts in [1, 2, 3, 4, 5, 100, 10_000] {
        let n = hosts as f64;
        assert!(near(seconds(&fleet(hosts), Way::SharedStorage), f64::max(140.0 / 5.0, n * 140.0 / 20.0)), "{hosts}");
        assert!(near(seconds(&fleet(hosts), Way::LocalNvme), 140.0 / 7.0), "{hosts}");
    }
    assert_eq!(limit(&fleet(4), Way::SharedStorage), Limit::StorageTotal);
    assert_eq!(limit(&fleet(3), Way::SharedStorage), Limit::StoragePerHost);
    let narrow = Fleet { nic: GB, ..fleet(3) };
    assert!(near(seconds(&narrow, Way::SharedStorage), 140.0));
    assert_eq!(limit(&narrow, Way::SharedStorage), Limit::Nic);
}

#[test]
fn filling_and_loading_follow_each_other() {
    assert!(near(seconds(&fleet(1), Way::FilledNvme), 140.0 / 5.0 + 140.0 / 7.0));
    assert!(near(seconds(&fleet(40), Way::FilledNvme), 140.0 * 40.0 / 20.0 + 140.0 / 7.0));
}

#[test]
fn gpus_share_or_copy() {
    let narrow = Fleet { gpu_link: GB, ..fleet(1) };
    assert!(near(seconds(&narrow, Way::SharedStorage), 140.0 / 5.0), "eight links of 1 GB/s are faster than the store");
    let copies = Fleet { gpu_copies: true, ..narrow };
    assert!(near(seconds(&copies, Way::SharedStorage), 140.0));
    assert_eq!(limit(&copies, Way::SharedStorage), Limit::GpuLink);
}

#[test]
fn one_host_has_no_peers_and_the_simplest_way_wins_a_tie() {
    assert!(simulate(&fleet(1)).iter().all(|outcome| outcome.way != Way::Peers));
    let outcomes = simulate(&Fleet { object: fleet(1).shared, ..fleet(1) });
    assert_eq!(best(&outcomes).unwrap().way, Way::SharedStorage);
}

#[test]
fn peers_take_over_where_the_store_is_shared_out() {
    let found = flips(&fleet(1), 10_000);
    // Two hosts that read half each, and swap, have twice what one host gets of the store.
    assert_eq!(found[..2], [Flip { hosts: 1, way: Way::SharedStorage }, Flip { hosts: 2, way: Way::Peers }]);
    let open = Storage { per_host: 20.0 * GB, total: 20.0 * GB };
    let found = flips(&Fleet { shared: Some(open), ..fleet(1) }, 10_000);
    assert_eq!(found, [Flip { hosts: 1, way: Way::SharedStorage }, Flip { hosts: 3, way: Way::Peers }]);
    let endless = Storage { per_host: 10.0 * GB, total: f64::INFINITY };
    assert_eq!(flips(&Fleet { shared: Some(endless), ..fleet(1) }, 10_000).len(), 1);
}

#[test]
fn what_is_no_bandwidth_gives_no_time() {
    let broken = Storage { per_host: 0.0, total: f64::NAN };
    let nothing = Fleet { shared: Some(broken), nvme: None, ..fleet(7) };
    assert_eq!((simulate(&nothing), flips(&nothing, 100)), (Vec::new(), Vec::new()));
    let empty = Fleet { bytes: 0, chunk_bytes: 0, gpus: 0, ..fleet(0) };
    assert!(simulate(&empty).iter().all(|outcome| outcome.seconds == 0.0));
}

#[test]
fn trees_are_as_deep_as_they_must_be() {
    let depths: Vec<u64> = [1, 2, 3, 4, 7, 8, 15, 16].map(|nodes| levels_below(nodes, 2)).to_vec();
    assert_eq!(depths, [0, 1, 1, 2, 2, 3, 3, 4]);
    assert_eq!((levels_below(10, 1), levels_below(13, 3), levels_below(14, 3)), (9, 2, 3));
}

fn any_fleet() -> impl Strategy<Value = Fleet> {
    let rate = || (0.1_f64..100.0).prop_map(|rate| rate * GB);
    let store = || (rate(), rate()).prop_map(|(per_host, total)| Storage { per_host, total });
    let sizes = (1_u64..10_000, 1_u64..1 << 40, 1_u64 << 20..1 << 30, 1_u64..9, any::<bool>());
    (sizes, rate(), rate(), store(), store(), rate(), rate()).prop_map(
        |((hosts, bytes, chunk_bytes, gpus, gpu_copies), gpu_link, nic, shared, object, read, write)| Fleet {
            hosts,
            bytes,
            chunk_bytes,
            gpus,
            gpu_link,
            gpu_copies,
            nic,
            shared: Some(shared),
            object: Some(object),
            nvme: Some(Drives { read, write }),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_chain_of_stages_is_what_the_events_say(first in 0.01_f64..9.0, services in prop::collection::vec(0.01_f64..9.0, 0..6), chunks in 1_usize..50) {
        let mut arrivals: Vec<f64> = (1..=chunks).map(|chunk| chunk as f64 * first).collect();
        let mut wave = Wave::of(first, chunks as f64);
        for service in services {
            let mut free = 0.0_f64;
            for arrival in &mut arrivals {
                free = free.max(*arrival) + service;
                *arrival = free;
            }
            wave = wave.through(service);
        }
        prop_assert!((wave.last() - arrivals.last().unwrap()).abs() < 1e-6);
    }

    #[test]
    fn peers_are_what_the_events_say(members in 2_usize..200, power in 0_u32..5, per_stripe in 1_usize..40, slack in 1.0_f64..4.0, send in 0.01_f64..1.0) {
        let stripes = 1_usize << power;
        prop_assume!(stripes <= members);
        // A stripe is fed no faster than a card can pass it to all children of a node.
        let feed = send * stripes as f64 * slack;
        let chunk = 1_000_000_u64;
        let chunks = (per_stripe * stripes) as u64;
        let total = chunk as f64 * stripes as f64 / feed;
        let store = Storage { per_host: f64::INFINITY, total };
        let fleet = Fleet { hosts: members as u64, bytes: chunk * chunks, chunk_bytes: chunk, nic: chunk as f64 / send, ..fleet(1) };
        let outcome = fleet.spread(Way::SharedStorage, store, 1, stripes as u64);
        // Stripes are fed in turn: the last of them starts its chunks one share of a step after the other.
        let stagger = feed / stripes as f64 * (stripes - 1) as f64;
        let events = last_arrival(members, stripes, per_stripe, feed, send) + stagger;
        let most = if stripes == 1 { 0.0 } else { send * stripes as f64 };
        prop_assert!(outcome.seconds >= events - 1e-6, "{outcome:?} before {events}");
        prop_assert!(outcome.seconds <= events + most + 1e-3, "{outcome:?} more than a turn after {events}");
    }

    #[test]
    fn nothing_beats_the_bounds(fleet in any_fleet()) {
        let (s, n) = (fleet.bytes as f64, fleet.hosts as f64);
        for outcome in simulate(&fleet) {
            prop_assert!(outcome.seconds >= s / fleet.gpu_rate() * 0.999_999, "{outcome:?}");
            let Some(store) = fleet.store(outcome.from.unwrap_or(outcome.way)) else { continue };
            // One copy must leave the store; every host must take all of it; all copies need all uplinks and the store.
            let all = n * s / (store.total + n * fleet.nic);
            let bound = (s / store.total).max(s / fleet.nic).max(all).max(s / (n * store.per_host));
            prop_assert!(outcome.seconds >= bound * 0.999_999, "{outcome:?} beats {bound}");
        }
    }

    #[test]
    fn peers_are_no_slower_than_a_chain_and_need_at_least_log2_steps(fleet in any_fleet()) {
        let Some(store) = fleet.shared else { return Ok(()) };
        let alone = Fleet { object: None, ..fleet.clone() };
        let Some(peers) = simulate(&alone).into_iter().find(|outcome| outcome.way == Way::Peers) else { return Ok(()) };
        let (c, chunks, nic, n) = (fleet.chunk(), fleet.chunks(), fleet.nic, fleet.hosts as f64);
        let feed = store.per_host.min(store.total).min(nic);
        let hops = (n - 1.0) * c / nic;
        let step = (c / feed).max(c / fleet.gpu_rate());
        let chain = c / feed + hops + c / fleet.gpu_rate() + (chunks - 1.0) * step;
        prop_assert!(peers.seconds <= chain * 1.001_1, "{peers:?} after a chain's {chain}");
        // One group: what the store gave out once doubles at best with each transfer of a chunk.
        if peers.spread.is_some_and(|spread| spread.groups == 1) {
            prop_assert!(peers.seconds >= n.log2().floor() * c / nic * 0.999_999);
        }
    }

    #[test]
    fn more_of_anything_good_is_never_slower(fleet in any_fleet(), more in 1.0_f64..10.0) {
        let faster = |store: Option<Storage>| store.map(|s| Storage { per_host: s.per_host * more, total: s.total * more });
        let better = [
            Fleet { nic: fleet.nic * more, ..fleet.clone() },
            Fleet { gpu_link: fleet.gpu_link * more, ..fleet.clone() },
            Fleet { shared: faster(fleet.shared), object: faster(fleet.object), ..fleet.clone() },
            Fleet { nvme: fleet.nvme.map(|d| Drives { read: d.read * more, write: d.write * more }), ..fleet.clone() },
        ];
        for before in simulate(&fleet) {
            for fleet in &better {
                prop_assert!(seconds(fleet, before.way) <= before.seconds * 1.001_1, "{before:?} {fleet:?}");
            }
        }
    }

    #[test]
    fn more_hosts_never_make_a_store_faster(fleet in any_fleet(), more in 1_u64..5_000) {
        let larger = Fleet { hosts: fleet.hosts + more, ..fleet.clone() };
        for way in [Way::SharedStorage, Way::ObjectStorage, Way::FilledNvme, Way::LocalNvme] {
            prop_assert!(seconds(&larger, way) >= seconds(&fleet, way) * 0.999_999);
        }
    }

    #[test]
    fn twice_the_model_in_chunks_twice_as_large_takes_twice_as_long(fleet in any_fleet()) {
        // The chunk grows with it, so that it is all a matter of scale.
        let larger = Fleet { bytes: fleet.bytes * 2, chunk_bytes: fleet.chunk_bytes * 2, ..fleet.clone() };
        for outcome in simulate(&fleet) {
            prop_assert!((seconds(&larger, outcome.way) / outcome.seconds - 2.0).abs() < 0.01);
        }
    }
}
