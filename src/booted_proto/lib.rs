//! The messages that only the booted system, the services and the operator's program use. `proto`
//! has the others, and says how they are generated.

macro_rules! package {
    ($name:ident, $file:literal $(, $fact:item)*) => {
        #[allow(missing_docs, clippy::all)]
        pub mod $name {
            include!($file);
            $($fact)*
        }
    };
}

// the generated messages use this name
use proto::attested;

package!(components, "components.rs");
package!(evidence, "evidence.rs");
package!(
    generation,
    "generation.rs",
    /// Returns the generation of a member's state disk.
    pub const GENERATION: &str = "/generation.API/Generation";
);
package!(
    init,
    "init.rs",
    /// The operator initializes the first node of a cluster.
    pub const INIT: &str = "/init.API/Init";,
    /// Maximum size of a request in bytes; anybody may send one. Ten components take 8 KiB, 64 with
    /// patches of 1 KiB take 80 KiB.
    pub const MAX_REQUEST: usize = 128 << 10;,
    /// TCP port of a node's init server; a member of a cluster answers `firstlight status` on it.
    pub const PORT: u16 = 9000;,
    /// Request metadata of a caller that wants progress messages; the value is `1`.
    pub const PROGRESS: &str = "firstlight-progress";
);
package!(
    join,
    "join.rs",
    pub use proto::join::*;,
    /// Lets a new node join.
    pub const ISSUE_JOIN_TICKET: &str = "/join.API/IssueJoinTicket";
);
package!(
    kms,
    "kms.rs",
    /// Derives a key from the master secret.
    pub const GET_DATA_KEY: &str = "/kms.API/GetDataKey";,
    /// Maximum size of a request in bytes: one short id, and the handle of a volume.
    pub const MAX_REQUEST: usize = 2048;,
    /// TCP port of the key service.
    pub const PORT: u16 = 9000;
);
package!(
    operator,
    "operator.rs",
    /// Makes a client certificate of Kubernetes.
    pub const KUBECONFIG: &str = "/operator.API/Kubeconfig";,
    /// Sends a log.
    pub const LOGS: &str = "/operator.API/Logs";,
    /// Sends facts about the node.
    pub const SUPPORT: &str = "/operator.API/Support";,
    /// Restarts the machine or a unit, or switches it off.
    pub const CONTROL: &str = "/operator.API/Control";,
    /// Restores etcd from a snapshot.
    pub const RESTORE_ETCD: &str = "/operator.API/RestoreEtcd";,
    /// Brings a newer version of the image.
    pub const UPDATE: &str = "/operator.API/Update";,
    /// Refuses a key.
    pub const REVOKE: &str = "/operator.API/Revoke";,
    /// Maximum size of a request in bytes: a certificate and a signature of an RSA key with 16 384 bits have 9 KiB together.
    pub const MAX_REQUEST: usize = 24 << 10;
);
package!(
    verify,
    "verify.rs",
    /// Returns an attestation document for a nonce.
    pub const GET_ATTESTATION: &str = "/verify.API/GetAttestation";,
    /// Maximum size of a request in bytes: a nonce.
    pub const MAX_REQUEST: usize = 256;,
    /// Maximum size of a response in bytes, with a document of Constellation.
    pub const MAX_RESPONSE: usize = 512 << 10;,
    /// TCP port on each node of Constellation (a NodePort).
    pub const NODE_PORT: u16 = 30081;,
    /// The user data of each document.
    pub const USER_DATA: &[u8] = b"VerifyService";
);
