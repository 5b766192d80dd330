//! Reads the claims of an attestation result (JSON) from standard input, and prints what the library understands of them: profile, status
//! of the node, vector, policies, verifier.

use ear::{Ear, TrustTier};

fn main() {
    let text = std::io::read_to_string(std::io::stdin()).unwrap();
    let ear: Ear = serde_json::from_str(&text).unwrap();
    ear.validate().unwrap();
    let node = &ear.submods["node"];
    let mut again = ear::Appraisal::new();
    again.trust_vector = node.trust_vector;
    again.update_status_from_trust_vector();
    assert_eq!(again.status, TrustTier::Affirming, "the status that the vector gives");
    assert_eq!(ear.most_severe_submod_status(), ear.status.unwrap());
    let vector = node.trust_vector;
    println!("{} {}", ear.profile, node.status.as_str());
    println!(
        "{} {} {}",
        vector.instance_identity.value(),
        vector.executables.value(),
        vector.hardware.value()
    );
    println!("{}", node.policy_ids.join(" "));
    println!("{} {}", ear.vid.developer, ear.vid.build);
}
