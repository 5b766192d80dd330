// Says of configurations of kubeadm whether Kubernetes accepts them, by its own code: kubeadm's checks, then those of the API server and
// of the controller manager with the arguments that kubeadm gives them, then the validation of the API's object with the services'
// networks. Reads a configuration a line as a JSON string; writes a line for each: the error as a JSON string, "" if there is none.
// Opens no port to others. tools/kubernetes.sh builds it beside the programs whose code it calls.
package main

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/keyutil"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/controller-manager/pkg/clientbuilder"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app/options"
	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	manager "k8s.io/kubernetes/cmd/kube-controller-manager/app/options"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/controlplane"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/config"
	"k8s.io/kubernetes/cmd/kubeadm/app/util/pkiutil"
	"k8s.io/kubernetes/pkg/apis/networking"
	"k8s.io/kubernetes/pkg/apis/networking/validation"
	kubectrlmgrconfig "k8s.io/kubernetes/pkg/controller/apis/config"
)

// A folder with the key of service accounts, the only file that the API server reads before its checks.
var certificates string

// An API server without nodes, for the controller that divides the pods' networks.
var server *httptest.Server

func main() {
	var err error
	certificates, err = os.MkdirTemp("", "certificates")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(certificates)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		log.Fatal(err)
	}
	pem, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(certificates, "sa.key"), pem, 0o600); err != nil {
		log.Fatal(err)
	}
	server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"apiVersion":"v1","kind":"NodeList","metadata":{"resourceVersion":"1"},"items":[]}`)
	}))
	defer server.Close()

	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var configuration, answer string
		if err := json.Unmarshal(lines.Bytes(), &configuration); err != nil {
			log.Fatal(err)
		}
		if err := check([]byte(configuration)); err != nil {
			answer = err.Error()
		}
		if err := answers.Encode(answer); err != nil {
			log.Fatal(err)
		}
	}
	if err := lines.Err(); err != nil {
		log.Fatal(err)
	}
}

func check(configuration []byte) error {
	cfg, err := config.BytesToInitConfiguration(configuration, true)
	if err != nil {
		return fmt.Errorf("kubeadm: %w", err)
	}
	if _, err := pkiutil.GetAPIServerAltNames(cfg); err != nil {
		return fmt.Errorf("kubeadm, certificates: %w", err)
	}
	cfg.CertificatesDir = certificates
	pods := controlplane.GetStaticPodSpecs(&cfg.ClusterConfiguration, &cfg.LocalAPIEndpoint, nil)
	command := func(name string) []string {
		return pods[name].Spec.Containers[0].Command[1:]
	}
	if err := checkServer(command("kube-apiserver")); err != nil {
		return fmt.Errorf("kube-apiserver: %w", err)
	}
	if err := checkManager(command("kube-controller-manager")); err != nil {
		return fmt.Errorf("kube-controller-manager: %w", err)
	}
	services := networking.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networking.ServiceCIDRSpec{CIDRs: strings.Split(cfg.Networking.ServiceSubnet, ",")},
	}
	if err := validation.ValidateServiceCIDR(&services).ToAggregate(); err != nil {
		return fmt.Errorf("ServiceCIDR: %w", err)
	}
	return nil
}

func parse(flags cliflag.NamedFlagSets, arguments []string) error {
	all := pflag.NewFlagSet("", pflag.ContinueOnError)
	for _, set := range flags.FlagSets {
		all.AddFlagSet(set)
	}
	return all.Parse(arguments)
}

func checkServer(arguments []string) error {
	options := apiserver.NewServerRunOptions()
	if err := parse(options.Flags(), arguments); err != nil {
		return err
	}
	completed, err := options.Complete(context.Background())
	if err != nil {
		return err
	}
	return utilerrors.NewAggregate(completed.Validate())
}

func checkManager(arguments []string) error {
	options, err := manager.NewKubeControllerManagerOptions()
	if err != nil {
		return err
	}
	known, disabled, aliases := app.KnownControllers(), app.ControllersDisabledByDefault(), app.ControllerAliases()
	if err := parse(options.Flags(known, disabled, aliases), arguments); err != nil {
		return err
	}
	if err := options.Validate(known, disabled, aliases); err != nil {
		return err
	}
	var component kubectrlmgrconfig.KubeControllerManagerConfiguration
	if err := options.KubeCloudShared.ApplyTo(&component.KubeCloudShared); err != nil {
		return err
	}
	if err := options.NodeIPAMController.ApplyTo(&component.NodeIPAMController); err != nil {
		return err
	}
	client := &rest.Config{Host: server.URL, QPS: -1}
	set, err := kubernetes.NewForConfig(client)
	if err != nil {
		return err
	}
	_, err = app.NewControllerDescriptors()[names.NodeIpamController].BuildController(context.Background(), app.ControllerContext{
		ClientBuilder:   clientbuilder.SimpleControllerClientBuilder{ClientConfig: client},
		InformerFactory: informers.NewSharedInformerFactory(set, 0),
		ComponentConfig: component,
	})
	return err
}
