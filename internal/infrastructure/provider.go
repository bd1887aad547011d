// Package infrastructure is the infrastructure provider: clusters' networks and load balancers, and machines,
// on the hosts that run capstand.
//
// Layer: reconciler. Allowed imports: api, library, contract.
package infrastructure

import (
	"context"
	"errors"
	"fmt"
	"net/netip"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/controllers/crdmigrator"
	"sigs.k8s.io/cluster-api/exp/runtime/server"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	infrav1beta1 "capstan.dev/capstan/api/infrastructure/v1beta1"
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/capstanhost"
	"capstan.dev/capstan/internal/infrastructure/cluster"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/extension"
	"capstan.dev/capstan/internal/infrastructure/hostjoin"
	"capstan.dev/capstan/internal/infrastructure/inventory"
	"capstan.dev/capstan/internal/infrastructure/machine"
	"capstan.dev/capstan/internal/infrastructure/machineaccess"
	"capstan.dev/capstan/internal/infrastructure/machinepool"
	"capstan.dev/capstan/internal/infrastructure/machinetemplate"
	"capstan.dev/capstan/internal/infrastructure/network"
	"capstan.dev/capstan/internal/infrastructure/services"
	"capstan.dev/capstan/internal/infrastructure/volume"
	"capstan.dev/capstan/internal/infrastructure/webhook"
	"capstan.dev/capstan/internal/reconciling"
)

// The migration of stored objects (ALL-14):
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions,verbs=get;list;watch
// +kubebuilder:rbac:groups=apiextensions.k8s.io,resources=customresourcedefinitions;customresourcedefinitions/status,verbs=patch,resourceNames=capstanclusters.infrastructure.capstan.dev;capstanclustertemplates.infrastructure.capstan.dev;capstanmachines.infrastructure.capstan.dev;capstanmachinetemplates.infrastructure.capstan.dev;capstanmachinepools.infrastructure.capstan.dev;capstanmachinepooltemplates.infrastructure.capstan.dev
// +kubebuilder:rbac:groups=infrastructure.capstan.dev,resources=capstanclustertemplates;capstanmachinetemplates;capstanmachinepooltemplates,verbs=get;list;patch

// Provider returns the infrastructure provider.
func Provider() reconciling.Provider {
	f := &flags{inbound: connections.NewInbound()}
	return reconciling.Provider{
		Name:              "infrastructure",
		NeedsClusterCache: true, // for the Services of clusters
		Kinds:             []string{infrav1.ClusterKind, infrav1.MachineKind, infrav1.MachineTemplateKind, infrav1.MachinePoolKind, infrav1.MachinePoolTemplateKind, infrav1.HostKind, infrav1.VolumeKind},
		ByCluster:         []client.Object{&clusterv1.Machine{}, &infrav1.CapstanMachine{}},
		AddToScheme: func(s *runtime.Scheme) error {
			return errors.Join(infrav1.AddToScheme(s), infrav1beta1.AddToScheme(s), bootstrapv1.AddToScheme(s))
		},
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
		SetupWebhooks: func(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options) error {
			return errors.Join(webhook.SetupWithManager(mgr), setupExtension(mgr, opts), machineaccess.SetupWithManager(ctx, mgr, f.inbound, f.maxImageBytes))
		},
	}
}

// setupExtension adds the hooks of updates in place to the server of the webhooks, which has a certificate and a Service.
func setupExtension(mgr ctrl.Manager, opts reconciling.Options) error {
	s, ok := mgr.GetWebhookServer().(*server.Server)
	if !ok {
		return nil
	}
	return extension.Setup(s, opts.LiveClient)
}

type flags struct {
	networkPool   string
	networkBits   int
	endpointPorts utilnet.PortRange
	maxImageBytes int64
	inbound       *connections.Inbound
}

func (f *flags) add(fs *pflag.FlagSet) {
	fs.StringVar(&f.networkPool, "machine-network-pool", network.DefaultPool,
		"IPv4 network from which clusters get their machine networks. It must overlap no network that the hosts or the machines reach.")
	fs.IntVar(&f.networkBits, "machine-network-prefix-length", network.DefaultBits,
		"Prefix length of the machine networks in --machine-network-pool.")
	fs.Int64Var(&f.maxImageBytes, "max-image-bytes", machineaccess.DefaultMaxImageBytes,
		"Largest image archive, in bytes, that users can load into machines through the API of the management cluster.")
	fs.StringVar(&f.inbound.Address, "host-listen-address", "",
		"Address, for example :7444, on which the leader accepts the connections of hosts that dial it (CapstanHosts with connection FromHost), with mutual TLS. It does not listen when empty.")
	f.endpointPorts = *utilnet.ParsePortRangeOrDie(network.DefaultPorts)
	fs.Var(&f.endpointPorts, "endpoint-port-range",
		"Ports on the tunnel addresses of hosts for the endpoints of clusters that span several hosts, one for each cluster. No other program may listen on them at the tunnel address or at all addresses of a host.")
}

func (f *flags) setup(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options) error {
	pool, err := netip.ParsePrefix(f.networkPool)
	if err != nil || !pool.Addr().Is4() {
		return fmt.Errorf("--machine-network-pool=%s must be an IPv4 network, for example %s", f.networkPool, network.DefaultPool)
	}
	if _, err := network.Choose(pool, f.networkBits, nil, netip.Prefix{}); err != nil {
		return fmt.Errorf("--machine-network-prefix-length: %w", err)
	}
	if f.endpointPorts.Base == 0 {
		return fmt.Errorf("--endpoint-port-range must be a range of TCP ports, for example %s", network.DefaultPorts)
	}
	if f.maxImageBytes < 0 {
		return fmt.Errorf("--max-image-bytes=%d must be a size in bytes, or 0 to refuse all archives", f.maxImageBytes)
	}
	return f.setupControllers(ctx, mgr, opts, pool)
}

// setupControllers adds the reconcilers of the infrastructure provider.
func (f *flags) setupControllers(ctx context.Context, mgr ctrl.Manager, opts reconciling.Options, networkPool netip.Prefix) error {
	inventory.Serve(mgr.GetCache())
	pool := connections.NewPool(ctx, mgr.GetAPIReader())
	pool.Inbound = f.inbound
	pool.ManagementCluster = func(ctx context.Context) (string, error) {
		return connections.ManagementCluster(ctx, mgr.GetClient())
	}
	var errs []error
	if f.inbound.Address != "" {
		errs = append(errs, mgr.Add(f.inbound))
	}
	for _, kind := range machinetemplate.Kinds {
		errs = append(errs, (&machinetemplate.Reconciler{Options: opts, Client: mgr.GetClient(), Kind: kind}).SetupWithManager(ctx, mgr))
	}
	return errors.Join(append(errs,
		(&capstanhost.Reconciler{Options: opts, Client: mgr.GetClient(), Pool: pool}).SetupWithManager(ctx, mgr),
		(&hostjoin.Reconciler{Options: opts, Client: mgr.GetClient()}).SetupWithManager(ctx, mgr),
		(&cluster.Reconciler{
			Options: opts, Client: mgr.GetClient(), Pool: pool, NetworkPool: networkPool, NetworkBits: f.networkBits, EndpointPorts: f.endpointPorts,
		}).SetupWithManager(ctx, mgr),
		(&services.Reconciler{Options: opts, Client: mgr.GetClient(), Pool: pool}).SetupWithManager(ctx, mgr),
		(&machine.Reconciler{Options: opts, Client: mgr.GetClient(), Pool: pool}).SetupWithManager(ctx, mgr),
		(&volume.Reconciler{Options: opts, Client: mgr.GetClient(), Pool: pool}).SetupWithManager(ctx, mgr),
		(&machinepool.Reconciler{Options: opts, Client: mgr.GetClient(), Workload: machinepool.Workloads(opts.SecretCachingClient)}).SetupWithManager(ctx, mgr),
	)...)
}
