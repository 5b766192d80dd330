//! The node's state file on the disk.
#![no_main]

use base::machines::Role;
use disk::state_disk::node_state::NodeState;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(state) = NodeState::parse(text) else {
        return;
    };
    assert_eq!(Role::parse(&state.role.to_string()), state.role);
});
