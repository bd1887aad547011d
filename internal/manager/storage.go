package manager

import (
	"context"
	"fmt"
	"maps"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"

	"sigs.k8s.io/cluster-api/controllers/crdmigrator"

	"capstan.dev/capstan/internal/reconciling"
)

// migrateStorage adds Cluster API's CRD migrator (ALL-14). If a CRD has a new storage version, the migrator stores the
// objects of the kind in this version and removes the others from status.storedVersions. It also removes the managed fields
// of versions that the CRD no longer serves. Only a manager that serves the webhooks does so: they convert the objects, and need
// rights in all namespaces, too.
func migrateStorage(ctx context.Context, mgr ctrl.Manager, flags *Flags, providers []reconciling.Provider) error {
	kinds := map[client.Object]crdmigrator.ByObjectConfig{}
	for _, p := range providers {
		maps.Copy(kinds, p.Versioned)
	}
	if flags.WebhookPort == 0 || len(kinds) == 0 {
		return nil
	}
	migrator := &crdmigrator.CRDMigrator{Client: mgr.GetClient(), APIReader: settledReader{mgr.GetAPIReader()}, Config: kinds}
	// The objects of one kind are written one after another.
	if err := migrator.SetupWithManager(ctx, mgr, controller.Options{MaxConcurrentReconciles: len(kinds)}); err != nil {
		return fmt.Errorf("migration of stored objects: %w", err)
	}
	return nil
}

// storageDelay is the time that all API servers need to use a new storage version. They have no signal for it. Kubernetes
// waits as long before it reports a new CRD as established.
const storageDelay = 5 * time.Second

// settledReader reads a CRD that needs a migration only after the API servers use its storage version. Without this, they
// could store a migrated object in the former version, and the migrator would remove that version from status.storedVersions.
type settledReader struct{ client.Reader }

func (r settledReader) Get(ctx context.Context, key client.ObjectKey, obj client.Object, opts ...client.GetOption) error {
	for settled := int64(-1); ; {
		if err := r.Reader.Get(ctx, key, obj, opts...); err != nil {
			return err
		}
		crd, ok := obj.(*apiextensionsv1.CustomResourceDefinition)
		if !ok || len(crd.Status.StoredVersions) == 1 || crd.Generation == settled {
			return nil
		}
		settled = crd.Generation
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(storageDelay):
		}
	}
}
