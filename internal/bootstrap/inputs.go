package bootstrap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"path"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	kubeadmv1 "sigs.k8s.io/cluster-api/api/bootstrap/kubeadm/v1beta2"
	clusterv1 "sigs.k8s.io/cluster-api/api/core/v1beta2"
	"sigs.k8s.io/cluster-api/util"
	"sigs.k8s.io/cluster-api/util/secret"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	bootstrapv1 "capstan.dev/capstan/api/bootstrap/v1beta2"
	controlplanev1 "capstan.dev/capstan/api/controlplane/v1beta2"
	"capstan.dev/capstan/internal/bootstrap/render"
	"capstan.dev/capstan/internal/contentsource"
	"capstan.dev/capstan/internal/kubeconfig"
	"capstan.dev/capstan/internal/node/nodeconfig"
	"capstan.dev/capstan/internal/pki"
	"capstan.dev/capstan/internal/reconciling"
)

// EncryptionSecretName is the secret with the encryption key of a cluster, in the key `value`. The
// control plane provider makes it.
func EncryptionSecretName(cluster string) string { return cluster + "-encryption" }

// notYet is the reason why bootstrap data cannot be created yet. It becomes the DataSecretAvailable condition.
type notYet struct {
	reason, message string
	// unseen is true if no event reports the change that the config waits for.
	unseen bool
}

func (n *notYet) Error() string { return n.message }

func waitFor(reason, format string, args ...any) error {
	return &notYet{reason: reason, message: fmt.Sprintf(format, args...)}
}

// input collects everything that the bootstrap data of a config is rendered from. The error is a *notYet if an input
// that a user or another controller provides is missing or invalid.
func (r *Reconciler) input(ctx context.Context, s *scope) (render.Input, error) {
	if err := mayBegin(s); err != nil {
		return render.Input{}, err
	}
	in, err := r.settings(ctx, s, s.config.Spec)
	if err != nil {
		return in, err
	}
	if in.Certificates, err = r.certificates(ctx, s, in.Role); err != nil {
		return in, err
	}
	if err := r.addSecrets(ctx, s, &in); err != nil {
		return in, err
	}
	if in.Role == nodeconfig.RoleWorker {
		in.Token, err = newToken()
	}
	return in, err
}

// settings returns the input of the configuration of a node with the spec, without any Secret. The error is one as of input.
func (r *Reconciler) settings(ctx context.Context, s *scope, spec bootstrapv1.CapstanConfigSpec) (render.Input, error) {
	in := render.Input{ClusterName: s.cluster.Name, Spec: spec, APIServerPort: render.APIServerPort(s.cluster)}

	var err error
	if in.Role, err = role(spec.Role, s.owner.controlPlane); err != nil {
		return in, err
	}
	settings, err := r.clusterSettings(s, in.Role)
	if err != nil {
		return in, err
	}
	if in.KubernetesVersion, err = kubernetesVersion(s); err != nil {
		return in, err
	}
	if in.Network, err = render.Network(s.cluster, settings); err != nil {
		return in, waitFor(bootstrapv1.InvalidConfigReason, "%s", err)
	}
	in.Endpoint, err = r.endpoint(ctx, s, in.Network)
	return in, err
}

// addSecrets reads the encryption key, and what the spec references. An update in place needs both, but no certificate authority. The error
// is one as of input.
func (r *Reconciler) addSecrets(ctx context.Context, s *scope, in *render.Input) (err error) {
	if in.Role != nodeconfig.RoleWorker && render.NeedsEncryptionKey(in.Spec.Cluster.Encryption) {
		if in.EncryptionKey, err = r.encryptionKey(ctx, s.cluster); err != nil {
			return err
		}
	}
	in.Secrets, in.ConfigMaps, err = r.references(ctx, s.config.Namespace, in.Spec)
	return err
}

// mayBegin ensures that only one machine starts the cluster. A manager that was paused for long and has lost its lease
// can still create a second one. A control plane of an older Capstan does not record its first Machine.
func mayBegin(s *scope) error {
	if s.config.Spec.Role != bootstrapv1.RoleInit || s.controlPlane == nil || s.owner.joined {
		return nil
	}
	first := controlplanev1.GetFirstMachine(s.controlPlane)
	if first.Name == "" {
		return nil
	}
	_, begun := s.controlPlane.Annotations[controlplanev1.InitializedAnnotation]
	if first.Restore != "" {
		begun = s.controlPlane.Annotations[controlplanev1.RestoredAnnotation] == first.Restore
	}
	switch {
	case first.Name != s.config.Name:
		return waitFor(bootstrapv1.InvalidConfigReason, "spec.role is Init, but the Machine %s starts this cluster: delete this machine", first.Name)
	case begun:
		return waitFor(bootstrapv1.InvalidConfigReason, "spec.role is Init, but the cluster has already started: delete this machine")
	}
	return nil
}

// role returns the role of the machine: that of the spec, if it does not contradict the Machine.
func role(given bootstrapv1.Role, controlPlaneMachine bool) (nodeconfig.Role, error) {
	switch {
	case given == "" && controlPlaneMachine:
		return "", waitFor(bootstrapv1.InvalidConfigReason, "spec.role is empty, but this is a control plane machine: set Init on the first machine and ControlPlane on the others, or use a CapstanControlPlane")
	case given == bootstrapv1.RoleWorker && controlPlaneMachine:
		return "", waitFor(bootstrapv1.InvalidConfigReason, "spec.role is Worker, but the Machine has the label %s: set another role, or remove the label", clusterv1.MachineControlPlaneLabel)
	case given == bootstrapv1.RoleInit:
		return nodeconfig.RoleInit, nil
	case given == bootstrapv1.RoleControlPlane:
		return nodeconfig.RoleControlPlane, nil
	}
	return nodeconfig.RoleWorker, nil
}

// clusterSettings returns the settings of the whole cluster. A control plane machine has them in its own spec. A worker
// takes them from the CapstanControlPlane. Workers of clusters with a control plane of another provider wait until it
// is initialized, as the contract requires. Workers of our control planes do not wait: their token is created as soon
// as the API server answers, and capstan-init waits for the token.
func (r *Reconciler) clusterSettings(s *scope, role nodeconfig.Role) (bootstrapv1.ClusterConfiguration, error) {
	if role != nodeconfig.RoleWorker {
		return render.WithDefaults(s.config.Spec.Cluster), nil
	}
	if s.config.Spec.Cluster.IsDefined() {
		return bootstrapv1.ClusterConfiguration{}, waitFor(bootstrapv1.InvalidConfigReason, "spec.cluster is for control plane machines: set it in the CapstanControlPlane's spec.config; workers read it there")
	}
	if s.controlPlane != nil {
		return render.WithDefaults(s.controlPlane.Spec.Config.Cluster), nil
	}
	if isCapstanControlPlane(s.cluster) {
		return bootstrapv1.ClusterConfiguration{}, waitFor(bootstrapv1.WaitingForControlPlaneReason, "the CapstanControlPlane %s does not exist yet", s.cluster.Spec.ControlPlaneRef.Name)
	}
	if !ptr.Deref(s.cluster.Status.Initialization.ControlPlaneInitialized, false) {
		return bootstrapv1.ClusterConfiguration{}, waitFor(bootstrapv1.WaitingForControlPlaneReason, "the control plane is not initialized yet")
	}
	return render.Foreign(), nil
}

func isCapstanControlPlane(cluster *clusterv1.Cluster) bool {
	return cluster.Spec.ControlPlaneRef.GroupKind() == controlplanev1.ControlPlaneGroupKind
}

func kubernetesVersion(s *scope) (string, error) {
	version := s.owner.version
	if version == "" && s.controlPlane != nil {
		version = s.controlPlane.Spec.Version
	}
	if version == "" {
		return "", waitFor(bootstrapv1.InvalidConfigReason, "the Machine has no spec.version: set the Kubernetes version of this machine")
	}
	version, err := render.Version(version)
	if err != nil {
		return "", waitFor(bootstrapv1.InvalidConfigReason, "the Machine's spec.version: %s", err)
	}
	return version, nil
}

// endpoint returns the endpoint of the control plane: that of the Cluster, or that of the kubeconfig secret as long as
// core has not copied it to the Cluster. The control plane provider creates the secret as soon as the endpoint is
// known.
func (r *Reconciler) endpoint(ctx context.Context, s *scope, network nodeconfig.Network) (string, error) {
	host, endpoint := s.cluster.Spec.ControlPlaneEndpoint.Host, s.cluster.Spec.ControlPlaneEndpoint.String()
	if !s.cluster.Spec.ControlPlaneEndpoint.IsValid() {
		server, err := r.kubeconfigServer(ctx, s.cluster)
		if err != nil {
			return "", err
		}
		if server == nil {
			return "", waitFor(bootstrapv1.WaitingForEndpointReason, "the Cluster has no spec.controlPlaneEndpoint yet")
		}
		host, endpoint = server.Hostname(), server.Host
	}
	if err := render.CheckEndpoint(host, network); err != nil {
		return "", waitFor(bootstrapv1.InvalidConfigReason, "%s", err)
	}
	return endpoint, nil
}

func (r *Reconciler) kubeconfigServer(ctx context.Context, cluster *clusterv1.Cluster) (*url.URL, error) {
	found, err := secret.GetFromNamespacedName(ctx, r.SecretCachingClient, util.ObjectKey(cluster), secret.Kubeconfig)
	if err != nil {
		return nil, client.IgnoreNotFound(err)
	}
	server, err := kubeconfig.Server(found.Data[secret.KubeconfigDataName])
	if err != nil || server.Port() == "" {
		return nil, nil // The secret is not ours. The Cluster will have the endpoint.
	}
	return server, nil
}

// certificates returns the files of the certificate authorities: all authorities with their keys for a control plane
// machine, only the cluster's certificate for a worker. The Secret of a user can lack the label of the cluster, as in encryptionKey.
func (r *Reconciler) certificates(ctx context.Context, s *scope, role nodeconfig.Role) ([]render.File, error) {
	certificates := Certificates(s.config.Spec.Cluster)
	if role == nodeconfig.RoleWorker {
		certificates = secret.NewCertificatesForWorker(path.Join(nodeconfig.PKIDir, "ca.crt"))
	}
	if err := certificates.LookupCached(ctx, r.SecretCachingClient, r.Client, util.ObjectKey(s.cluster)); err != nil {
		return nil, &notYet{reason: bootstrapv1.CertificatesMissingReason, message: fmt.Sprintf("a certificate authority cannot be read: %s", err), unseen: true}
	}
	var out []render.File
	for _, c := range certificates {
		if c.KeyPair == nil || len(c.KeyPair.Cert) == 0 || role != nodeconfig.RoleWorker && c.KeyFile != "" && len(c.KeyPair.Key) == 0 {
			return nil, &notYet{reason: bootstrapv1.CertificatesMissingReason, unseen: true, message: fmt.Sprintf(
				"the Secret %s does not exist, or lacks tls.crt or tls.key", secret.Name(s.cluster.Name, c.Purpose))}
		}
		out = append(out, render.File{Path: c.CertFile, Permissions: "0644", Content: c.KeyPair.Cert})
		if role != nodeconfig.RoleWorker && c.KeyFile != "" {
			out = append(out, render.File{Path: c.KeyFile, Permissions: "0600", Content: c.KeyPair.Key})
		}
	}
	if role == nodeconfig.RoleWorker {
		return out, nil
	}
	cross, err := r.crossCertificate(ctx, s)
	return append(out, cross...), err
}

// Certificates are the certificate authorities of a cluster, as the control plane provider creates them (CP-15). The
// default are ECDSA keys, because the creation of an RSA key takes longer than the start of an API server.
func Certificates(cluster bootstrapv1.ClusterConfiguration) secret.Certificates {
	config := &kubeadmv1.ClusterConfiguration{
		CertificatesDir:     nodeconfig.PKIDir,
		EncryptionAlgorithm: kubeadmv1.EncryptionAlgorithmType(cmp.Or(string(cluster.EncryptionAlgorithm), string(pki.ECDSAP256))),
	}
	if len(cluster.Etcd.External.Endpoints) > 0 {
		config.Etcd.External = kubeadmv1.ExternalEtcd{
			Endpoints: cluster.Etcd.External.Endpoints,
			CAFile:    etcdCAPath,
			CertFile:  etcdClientPath,
			KeyFile:   path.Join(nodeconfig.PKIDir, "apiserver-etcd-client.key"),
		}
	}
	return secret.NewCertificatesForInitialControlPlane(config)
}

// encryptionKey reads the key that encrypts resources in etcd. The Secret of a user can lack the label of the cluster: then it is not in
// the cache, and its changes are no events.
func (r *Reconciler) encryptionKey(ctx context.Context, cluster *clusterv1.Cluster) ([]byte, error) {
	name := EncryptionSecretName(cluster.Name)
	found, err := reconciling.GetSecret(ctx, r.SecretCachingClient, r.Client, client.ObjectKey{Namespace: cluster.Namespace, Name: name})
	if err != nil {
		return nil, err
	}
	if found != nil && len(found.Data[secret.KubeconfigDataName]) == render.EncryptionKeySize {
		return found.Data[secret.KubeconfigDataName], nil
	}
	return nil, &notYet{reason: bootstrapv1.CertificatesMissingReason, unseen: true, message: fmt.Sprintf(
		"the Secret %s does not exist, or its key `value` does not have %d bytes", name, render.EncryptionKeySize)}
}

// references reads the content of all Secrets and ConfigMaps that the spec references. All of it becomes data of a machine, which is one
// Secret. So more content than a Secret can have is not read: a spec can reference the same megabyte two hundred times.
func (r *Reconciler) references(ctx context.Context, namespace string, spec bootstrapv1.CapstanConfigSpec) (map[bootstrapv1.SecretKeyReference][]byte,
	map[bootstrapv1.ConfigMapKeyReference][]byte, error) {
	secretKeys, configMapKeys := render.References(spec)
	secrets, configMaps := map[bootstrapv1.SecretKeyReference][]byte{}, map[bootstrapv1.ConfigMapKeyReference][]byte{}
	left := corev1.MaxSecretSize
	take := func(content []byte, err error) ([]byte, error) {
		if err != nil {
			return nil, missingReference(err)
		}
		if left -= len(content); left < 0 {
			return nil, errTooLarge
		}
		return content, nil
	}
	var err error
	for _, ref := range secretKeys {
		if secrets[ref], err = take(contentsource.Secret(ctx, r.Client, namespace, ref)); err != nil {
			return nil, nil, err
		}
	}
	for _, ref := range configMapKeys {
		if configMaps[ref], err = take(contentsource.ConfigMap(ctx, r.Client, namespace, ref)); err != nil {
			return nil, nil, err
		}
	}
	return secrets, configMaps, nil
}

// errTooLarge names no size: only the beginning was read. A change of the content is no event.
var errTooLarge = &notYet{reason: bootstrapv1.InvalidConfigReason, unseen: true, message: fmt.Sprintf(
	"the Secrets and ConfigMaps that the spec references have more than %d MiB together, with those that it references several times: "+
		"expected less, because the bootstrap data of a machine is one Secret; download large files with a command", corev1.MaxSecretSize>>20)}

func missingReference(err error) error {
	if missing := (*contentsource.MissingError)(nil); errors.As(err, &missing) {
		return &notYet{reason: bootstrapv1.SecretMissingReason, message: missing.Error() + ", which the spec references", unseen: true}
	}
	return err
}

// reasonOf returns the reason of the condition that reports an error.
func reasonOf(err error) string {
	if n, ok := errors.AsType[*notYet](err); ok {
		return n.reason
	}
	return bootstrapv1.DataSecretNotAvailableReason
}

// retry returns the result of a step with errors. A *notYet is tried again by time only if no event reports the change that it waits for.
func retry(errs ...error) (result ctrl.Result, failed error) {
	for _, err := range errs {
		n, waits := errors.AsType[*notYet](err)
		switch {
		case !waits:
			failed = errors.Join(failed, err)
		case n.unseen:
			result.RequeueAfter = missingSecretRetry
		}
	}
	return result, failed
}
