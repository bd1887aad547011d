// Package infrastructure is the infrastructure provider: clusters' networks and load balancers, and machines,
// on the hosts that run capstand.
//
// Layer: reconciler.
package infrastructure

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cluster-api/controllers/crdmigrator"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/capstanhost"
	"capstan.dev/capstan/internal/infrastructure/cluster"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/machine"
	"capstan.dev/capstan/internal/infrastructure/machinepool"
	"capstan.dev/capstan/internal/infrastructure/machinetemplate"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/webhook"
	"capstan.dev/capstan/internal/reconciling"
)

// The migration of stored objects (ALL-14):
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions,verbs=get;list;watch
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions;customresourcedefinitions/status,verbs=patch,resourceNames=capstanclusters.infrastructure.capstan.dev;capstanclustertemplates.infrastructure.capstan.dev;capstanmachines.infrastructure.capstan.dev;capstanmachinetemplates.infrastructure.capstan.dev;capstanmachinepools.infrastructure.capstan.dev;capstanmachinepooltemplates.infrastructure.capstan.dev
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclustertemplates;capstanmachinetemplates;capstanmachinepooltemplates,verbs=get;list;patch

// Provider returns the infrastructure provider.
func Provider() reconciling.Provider {
	f := &flags{}
	return reconciling.Provider{
		Name:        "infrastructure",
		Kinds:       []string{"CapstanCluster", "CapstanMachine", "CapstanMachineTemplate", "CapstanMachinePool", "CapstanMachinePoolTemplate", "CapstanHost"},
		AddToScheme: func(s *runtime.Scheme) error { return errors.Join(infrav1.AddToScheme(s), infrav1beta1.AddToScheme(s)) },
		Versioned: map[client.Object]crdmigrator.ByObjectConfig{
			&infrav1.CapstanCluster{}:             reconciling.StoredByStatus,
			&infrav1.CapstanClusterTemplate{}:     reconciling.StoredByObject,
			&infrav1.CapstanMachine{}:             reconciling.StoredByStatus,
			&infrav1.CapstanMachineTemplate{}:     reconciling.StoredByStatus,
			&infrav1.CapstanMachinePool{}:         reconciling.StoredByStatus,
			&infrav1.CapstanMachinePoolTemplate{}: reconciling.StoredByStatus,
		},
		AddFlags: f.add,
		Setup:    f.setup,
		SetupWebhooks: func(mgr ctrl.Manager, _ reconciling.Options) error {
			return webhook.SetupWithManager(mgr)
		},
	}
}

type flags struct {
	networkPool string
	networkBits int
}

func (f *flags) add(fs *pflag.FlagSet) {
	fs.StringVar(&f.networkPool, "machine-network-pool", network.DefaultPool,
		"IPv4 network from which clusters get their machine networks. It must overlap no network that the hosts or the machines reach.")
	fs.IntVar(&f.networkBits, "machine-network-prefix-length", network.DefaultBits,
		"Prefix length of the machine networks in --machine-network-pool.")
}

func (f *flags) setup(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options) error {
	pool, err := netip.ParsePrefix(f.networkPool)
	if err != nil || !pool.Addr().Is4() {
		return fmt.Errorf("--machine-network-pool=%s must be an IPv4 network, for example %s", f.networkPool, network.DefaultPool)
	}
	if _, err := network.Choose(pool, f.networkBits, nil, netip.Prefix{}); err != nil {
		return fmt.Errorf("--machine-network-prefix-length: %w", err)
	}
	return Setup(ctx, mgr, opts, pool, f.networkBits)
}

// Setup adds the reconcilers of the infrastructure provider.
func Setup(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options, networkPool netip.Prefix, networkBits int) error {
	pool := connections.NewPool(ctx, mgr.GetAPIReader())
	var errs []error
	for _, kind := range machinetemplate.Kinds {
		errs = append(errs, (&machinetemplate.Reconciler{Options: opts, Client: mgr.GetClient(), Kind: kind}).SetupWithManager(ctx, mgr))
	}
	return errors.Join(append(errs,
		(&capstanhost.Reconciler{Options: opts, Client: mgr.GetClient(), Pool: pool}).SetupWithManager(ctx, mgr),
		(&cluster.Reconciler{
			Options: opts, Client: mgr.GetClient(), Pool: pool, NetworkPool: networkPool, NetworkBits: networkBits,
		}).SetupWithManager(ctx, mgr),
		(&machine.Reconciler{Options: opts, Client: mgr.GetClient(), Pool: pool}).SetupWithManager(ctx, mgr),
		(&machinepool.Reconciler{Options: opts, Client: mgr.GetClient()}).SetupWithManager(ctx, mgr),
	)...)
}
