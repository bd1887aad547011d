// Package testmanager runs the managers of integration tests, as a user with no more rights than an installed manager has.
package testmanager

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"capstan.dev/capstan/internal/manager"
	"capstan.dev/capstan/internal/reconciling"
	"capstan.dev/capstan/internal/testenv"
	"capstan.dev/capstan/internal/testenv/expect"
)

// User is the user of the managers. It has the roles of Bind and no other rights, so the tests prove that they are sufficient.
const User = "manager"

// As returns the configuration of User.
func As(config *rest.Config) *rest.Config {
	out := rest.CopyConfig(config)
	out.Impersonate.UserName = User
	return out
}

// Bind gives User a role in a file of config/<provider>/rbac. It creates the role, and its namespace.
func Bind(c client.Client, provider, file string) error {
	data, err := os.ReadFile(filepath.Join(testenv.Root(), "config", provider, "rbac", file))
	if err != nil {
		return err
	}
	role := &unstructured.Unstructured{}
	if err := yaml.Unmarshal(data, &role.Object); err != nil {
		return err
	}
	objects := []client.Object{role, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": role.GetAPIVersion(), "kind": role.GetKind() + "Binding",
		"metadata": map[string]any{"namespace": role.GetNamespace(), "name": role.GetName()},
		"subjects": []any{map[string]any{"apiGroup": rbacv1.GroupName, "kind": rbacv1.UserKind, "name": User}},
		"roleRef":  map[string]any{"apiGroup": rbacv1.GroupName, "kind": role.GetKind(), "name": role.GetName()},
	}}}
	if name := role.GetNamespace(); name != "" {
		objects = append([]client.Object{&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}}, objects...)
	}
	for _, o := range objects {
		if err := c.Create(context.Background(), o, client.FieldValidation(metav1.FieldValidationStrict)); err != nil {
			return err
		}
	}
	return nil
}

// Start runs a provider with its role and its webhooks, as `manager <provider>` does. wrap can be nil. stop ends the manager and waits.
func Start(env *testenv.Env, provider reconciling.Provider, wrap transport.WrapperFunc, flags ...string) (stop func(), err error) {
	if err := Bind(env.Client, provider.Name, "role.yaml"); err != nil {
		return nil, err
	}
	providers := []reconciling.Provider{provider}
	fs := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	parsed := manager.AddFlags(fs, providers)
	if err := fs.Parse(slices.Concat(env.WebhookFlags(), []string{"--health-addr=0", "--diagnostics-address=0"}, flags)); err != nil {
		return nil, err
	}
	config := As(env.Config)
	config.Wrap(wrap)
	ctx, cancel := context.WithCancel(ctrl.LoggerInto(context.Background(), ctrl.Log))
	mgr, err := manager.New(ctx, config, parsed, providers)
	if err != nil {
		cancel()
		return nil, err
	}
	ended, err := Run(ctx, mgr)
	if err != nil {
		cancel()
		return nil, err
	}
	return func() { cancel(); <-ended }, nil
}

// Run starts a manager with webhooks, and waits until it works. ended receives the result of the manager after the end of ctx.
func Run(ctx context.Context, mgr ctrl.Manager) (ended <-chan error, err error) {
	done := make(chan error, 1)
	go func() { done <- mgr.Start(ctx) }()
	waiting, cancel := context.WithTimeout(ctx, expect.Patience)
	defer cancel()
	for err := serving(mgr); err != nil; err = serving(mgr) {
		select {
		case result := <-done:
			return nil, fmt.Errorf("the manager ended: %w", errors.Join(result, err))
		case <-waiting.Done():
			return nil, fmt.Errorf("the manager does not work: %w", err)
		case <-time.After(10 * time.Millisecond): // The server of webhooks does not signal its start.
		}
	}
	if !mgr.GetCache().WaitForCacheSync(waiting) {
		return nil, errors.New("the caches did not sync")
	}
	return done, nil
}

// serving returns nil if the controllers and the webhooks of a manager have started.
func serving(mgr ctrl.Manager) error {
	select {
	case <-mgr.Elected():
		return mgr.GetWebhookServer().StartedChecker()(nil)
	default:
		return errors.New("its controllers have not started")
	}
}
