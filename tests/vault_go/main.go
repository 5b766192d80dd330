// A Vault server that keeps everything in memory, with the engine transit and the authentication method kubernetes. Its caller
// initializes and unseals it over its API.
//
//	vault_go CERTIFICATE KEY      files in PEM; prints HOST:PORT
package main

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"os"

	"github.com/hashicorp/go-hclog"
	kubernetes "github.com/hashicorp/vault-plugin-auth-kubernetes"
	"github.com/hashicorp/vault/builtin/logical/transit"
	vaulthttp "github.com/hashicorp/vault/http"
	"github.com/hashicorp/vault/sdk/helper/consts"
	"github.com/hashicorp/vault/sdk/logical"
	"github.com/hashicorp/vault/sdk/physical/inmem"
	"github.com/hashicorp/vault/vault"
)

// registry is the list of engines and authentication methods that are part of this program.
type registry struct{}

var plugins = map[consts.PluginType]struct {
	name    string
	factory logical.Factory
}{
	consts.PluginTypeSecrets:    {"transit", transit.Factory},
	consts.PluginTypeCredential: {"kubernetes", kubernetes.Factory},
}

func (registry) Contains(name string, kind consts.PluginType) bool {
	plugin, known := plugins[kind]
	return known && plugin.name == name
}

func (r registry) Get(name string, kind consts.PluginType) (func() (interface{}, error), bool) {
	return func() (interface{}, error) { return logical.Factory(plugins[kind].factory), nil }, r.Contains(name, kind)
}

func (registry) Keys(kind consts.PluginType) []string {
	if plugin, known := plugins[kind]; known {
		return []string{plugin.name}
	}
	return nil
}

func (registry) DeprecationStatus(name string, kind consts.PluginType) (consts.DeprecationStatus, bool) {
	return consts.Supported, true
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "vault:", err)
		os.Exit(1)
	}
}

func main() {
	log := hclog.New(&hclog.LoggerOptions{Output: os.Stderr, Level: hclog.Warn})
	storage, err := inmem.NewInmem(nil, log)
	check(err)
	core, err := vault.NewCore(&vault.CoreConfig{
		Physical:        storage,
		Logger:          log,
		DisableMlock:    true,
		BuiltinRegistry: registry{},
		LogicalBackends: map[string]logical.Factory{"transit": transit.Factory},
		// as those of tokens, it is part of this program
		CredentialBackends: map[string]logical.Factory{"kubernetes": kubernetes.Factory},
	})
	check(err)
	certificate, err := tls.LoadX509KeyPair(os.Args[1], os.Args[2])
	check(err)
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}})
	check(err)
	fmt.Println(listener.Addr())
	check(http.Serve(listener, vaulthttp.Handler.Handler(&vault.HandlerProperties{Core: core})))
}
