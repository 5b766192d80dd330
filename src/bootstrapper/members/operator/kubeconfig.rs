//! A client certificate for Kubernetes, by the authority on this control plane's disk.

use std::fs;
use std::time::{Duration, SystemTime};

use kubernetes::client_certificate::{self, Subject};
use proto::operator::{KubeconfigRequest, KubeconfigResponse};
use rpc::grpc::{Call, Code, Status};

use super::OperatorService;
use super::callers::Right;
use base::crypto::Secret;

/// The folder of kubeadm's files.
const KUBERNETES: &str = crate::members::renew::KUBERNETES;
/// Maximum validity of a certificate.
const MAX_VALIDITY: Duration = Duration::from_secs(366 * 24 * 3600);

impl OperatorService {
    pub(super) fn kubeconfig(
        &self,
        call: &Call,
        request: &KubeconfigRequest,
    ) -> Result<KubeconfigResponse, Status> {
        let caller = self
            .callers
            .of_call(call, request.caller.as_ref(), Right::Change)?;
        let validity = Duration::from_secs(request.seconds);
        if validity.is_zero() || validity > MAX_VALIDITY {
            let text = "the certificate must be valid for a second to 366 days";
            return Err(Status::new(Code::InvalidArgument, text));
        }
        let subject = Subject::new(&request.user, &request.groups)
            .map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?;
        let (user, groups) = (&request.user, request.groups.join(","));
        let hours = request.seconds / 3600;
        self.record.add(
            call,
            &caller,
            &format!("kubeconfig for {user:?} in {groups:?}, valid for {hours} h"),
        )?;
        let kubernetes = self.machine.file(KUBERNETES);
        let read = |name: &str| {
            fs::read(kubernetes.join(name)).map_err(|error| {
                let text = format!(
                    "this node has no {KUBERNETES}/{name} ({error}): only a control plane makes certificates for Kubernetes"
                );
                Status::new(Code::FailedPrecondition, text)
            })
        };
        let key = Secret::new(read("pki/ca.key")?);
        let (certificate, template) = (read("pki/ca.crt")?, Secret::new(read("admin.conf")?));
        let kubeconfig = client_certificate::kubeconfig(
            &certificate,
            key.expose(),
            template.expose(),
            &subject,
            validity,
            SystemTime::now(),
        );
        let kubeconfig =
            kubeconfig.map_err(|error| Status::new(Code::Internal, error.to_string()))?;
        Ok(KubeconfigResponse {
            kubeconfig: kubeconfig.expose().to_vec(),
        })
    }
}
