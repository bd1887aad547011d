package agent

import (
	"context"
	"path/filepath"
	"time"

	"k8s.io/client-go/dynamic"

	"capstan.dev/capstan/internal/changes"
	"capstan.dev/capstan/internal/machineapi"
	"capstan.dev/capstan/internal/node/backup"
	"capstan.dev/capstan/internal/node/etcd"
	"capstan.dev/capstan/internal/node/initapi"
	"capstan.dev/capstan/internal/node/kube"
	"capstan.dev/capstan/internal/node/nodeconfig"
)

// endpointClient returns a client with the agent's credential for the cluster's endpoint. The machine's own API server may
// be stopped or unhealthy while its etcd leads.
func (a *agent) endpointClient(ctx context.Context) (dynamic.Interface, error) {
	if err := changes.WaitFor(ctx, nodeconfig.AgentKubeconfig); err != nil {
		return nil, err
	}
	return kube.NewEndpointClient(nodeconfig.AgentKubeconfig, "https://"+a.config.Endpoint)
}

// careForEtcd manages all members of etcd while this machine's member leads.
func (a *agent) careForEtcd(ctx context.Context) error {
	client, err := a.endpointClient(ctx)
	if err != nil {
		return err
	}
	objects, err := etcd.WatchObjects(ctx, client, "")
	if err != nil {
		return err
	}
	tls, err := etcd.TLS(nodeconfig.PKIDir)
	if err != nil {
		return err
	}
	care := &etcd.Care{Name: a.name, Endpoint: etcd.LocalEndpoint, TLS: tls, Objects: objects, Log: a.log}
	return care.Run(ctx)
}

// careForOwnMember reports the state of this machine's member, and stops the machine's servers when the member must leave.
func (a *agent) careForOwnMember(ctx context.Context, expires <-chan time.Time) error {
	client, err := a.endpointClient(ctx)
	if err != nil {
		return err
	}
	init := initapi.NewClient(initapi.Socket)
	self := &etcd.Self{
		Name: a.name, Client: client, Expires: expires, Log: a.log,
		Stop: func(ctx context.Context, service string) error { return init.Service(ctx, service, "stop") },
	}
	return self.Run(ctx)
}

// backupDir contains a snapshot until it is in the store.
const backupDir = "/var/lib/capstan/etcd-backup"

// makeBackups makes the backups and the backup checks that name this machine's member.
func (a *agent) makeBackups(ctx context.Context) error {
	client, err := a.endpointClient(ctx)
	if err != nil {
		return err
	}
	tls, err := etcd.TLS(nodeconfig.PKIDir)
	if err != nil {
		return err
	}
	runner := &backup.Runner{
		Name: a.name, Client: client, Member: backup.Member{Endpoint: etcd.LocalEndpoint, TLS: tls}, Dir: backupDir, Log: a.log,
		Etcdutl: filepath.Join(machineapi.AssetsFolder, "kubernetes", a.config.KubernetesVersion, "etcdutl"),
	}
	return runner.Run(ctx)
}
