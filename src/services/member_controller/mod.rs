//! What happens to members after they have joined: none of it hands out keys or admits a node.
//!
//! | file | work |
//! |---|---|
//! | [`approver`] | approval of kubelets' certificates |
//! | [`watch`] | asks members for fresh evidence, and shows the result at their Nodes |
//! | [`deleted_machines`] | the records of machines that no longer exist are deleted |
//! | [`audit`] | a log line, an event and a count for each decision |

pub mod approver;
pub mod audit;
pub mod deleted_machines;
pub mod watch;
