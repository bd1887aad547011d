package testenv

import (
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// tokenAuthn gives all users of an API server the token of a cluster-admin. With a client certificate, as envtest would have it,
// the API server verifies signatures in each request.
type tokenAuthn struct {
	token, file string
	// beforeServer runs between the start of etcd and that of the API server.
	beforeServer func() error
}

// Configure implements envtest.Authn.
func (a *tokenAuthn) Configure(dir string, args *envtest.Arguments) error {
	a.file = filepath.Join(dir, "tokens.csv")
	args.Set("token-auth-file", a.file)
	return nil
}

// Start implements envtest.Authn.
func (a *tokenAuthn) Start() error {
	if err := os.WriteFile(a.file, []byte(a.token+",admin,admin,system:masters\n"), 0o600); err != nil {
		return err
	}
	return a.beforeServer()
}

// AddUser implements envtest.Authn.
func (a *tokenAuthn) AddUser(_ envtest.User, base *rest.Config) (*rest.Config, error) {
	out := rest.CopyConfig(base)
	out.BearerToken = a.token
	return out, nil
}

// Stop implements envtest.Authn.
func (a *tokenAuthn) Stop() error { return nil }
