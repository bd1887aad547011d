package testcluster

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/manager"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// StartManager runs a provider against a test API server, with no more rights than its role in
// config/<provider>/rbac gives it. stop ends it and waits.
func StartManager(env *testenv.Env, provider reconciling.Provider) (stop func(), err error) {
	restConfig, err := Restricted(env, provider.Name)
	if err != nil {
		return nil, err
	}
	providers := []reconciling.Provider{provider}
	fs := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	flags := manager.AddFlags(fs, providers)
	args := []string{"--health-addr=0", "--diagnostics-address=0", "--webhook-port=0"}
	if env.Webhooks.LocalServingPort != 0 {
		args = append(args[:2], "--webhook-host="+env.Webhooks.LocalServingHost, "--webhook-cert-dir="+env.Webhooks.LocalServingCertDir,
			fmt.Sprintf("--webhook-port=%d", env.Webhooks.LocalServingPort))
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctrl.LoggerInto(context.Background(), ctrl.Log))
	mgr, err := manager.New(ctx, restConfig, flags, providers)
	if err != nil {
		cancel()
		return nil, err
	}
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	if env.Webhooks.LocalServingPort != 0 {
		address := net.JoinHostPort(env.Webhooks.LocalServingHost, strconv.Itoa(env.Webhooks.LocalServingPort))
		if err := waitForPort(address, done); err != nil {
			cancel()
			return nil, err
		}
	}
	return func() { cancel(); <-done }, nil
}

// Restricted returns the configuration of a user with the role of a provider.
func Restricted(env *testenv.Env, provider string) (*rest.Config, error) {
	data, err := os.ReadFile(filepath.Join(testenv.Root(), "config", provider, "rbac", "role.yaml"))
	if err != nil {
		return nil, err
	}
	role := &rbacv1.ClusterRole{}
	if err := yaml.UnmarshalStrict(data, role); err != nil {
		return nil, err
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: role.Name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: role.Name}},
	}
	for _, obj := range []client.Object{role, binding} {
		if err := env.Client.Create(context.Background(), obj); err != nil {
			return nil, err
		}
	}
	out := rest.CopyConfig(env.Config)
	out.Impersonate.UserName = role.Name
	return out, nil
}

func waitForPort(address string, done <-chan error) error {
	var err error
	for end := time.Now().Add(expect.Patience); time.Now().Before(end); {
		var conn net.Conn
		if conn, err = net.Dial("tcp", address); err == nil {
			return conn.Close()
		}
		select {
		case err := <-done:
			return fmt.Errorf("the manager ended: %w", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return fmt.Errorf("the webhook server at %s does not listen: %w", address, err)
}
