package testenv

import (
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"slices"
	"strconv"

	clientv3 "go.etcd.io/etcd/client/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"capstan.dev/capstan/internal/testenv/expect"
)

// readCRDs reads the CRDs of Cluster API and Capstan. Those of providers with webhooks are converted by the webhook server.
func readCRDs(root, capi string, server envtest.WebhookInstallOptions, webhooks []string) ([]*apiextensionsv1.CustomResourceDefinition, error) {
	folders, err := filepath.Glob(filepath.Join(root, "config", "*", "crd", "bases"))
	if err != nil {
		return nil, err
	}
	var out []*apiextensionsv1.CustomResourceDefinition
	for _, folder := range append(folders, filepath.Join(capi, "core", "config", "crd", "bases")) {
		files := envtest.CRDInstallOptions{Paths: []string{folder}, ErrorIfPathMissing: true}
		if err := envtest.ReadCRDFiles(&files); err != nil {
			return nil, err
		}
		served := slices.ContainsFunc(webhooks, func(w string) bool { return filepath.Join(root, filepath.Dir(w), "crd", "bases") == folder })
		for _, crd := range files.CRDs {
			if served && len(crd.Spec.Versions) > 1 {
				crd.Spec.Conversion = conversion(server)
			}
		}
		out = append(out, files.CRDs...)
	}
	return out, nil
}

// conversion is that of the webhook server of a suite.
func conversion(server envtest.WebhookInstallOptions) *apiextensionsv1.CustomResourceConversion {
	return &apiextensionsv1.CustomResourceConversion{
		Strategy: apiextensionsv1.WebhookConverter,
		Webhook: &apiextensionsv1.WebhookConversion{
			ClientConfig: &apiextensionsv1.WebhookClientConfig{
				URL:      ptr.To("https://" + net.JoinHostPort(server.LocalServingHost, strconv.Itoa(server.LocalServingPort)) + "/convert"),
				CABundle: server.LocalServingCAData,
			},
			ConversionReviewVersions: []string{"v1"},
		},
	}
}

// storeCRDs writes CRDs to etcd as an API server stores them. An API server compiles all rules of a CRD that it installs, and
// needs more processor time for that than for its own start. TestCRDs lets an API server check the CRDs.
func storeCRDs(etcd string, crds []*apiextensionsv1.CustomResourceDefinition) error {
	ctx, cancel := context.WithTimeout(context.Background(), expect.Patience)
	defer cancel()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{etcd}})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	for _, crd := range crds {
		value, err := json.Marshal(established(crd))
		if err != nil {
			return err
		}
		if _, err := c.Put(ctx, "/registry/"+apiextensionsv1.GroupName+"/customresourcedefinitions/"+crd.Name, string(value)); err != nil {
			return err
		}
	}
	return nil
}

// established returns a CRD with the fields that the API server and its controllers set.
func established(crd *apiextensionsv1.CustomResourceDefinition) *apiextensionsv1.CustomResourceDefinition {
	out := crd.DeepCopy()
	out.SetGroupVersionKind(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
	apiextensionsv1.SetObjectDefaults_CustomResourceDefinition(out)
	now := metav1.Now()
	out.UID, out.Generation, out.CreationTimestamp = uuid.NewUUID(), 1, now
	out.Status = apiextensionsv1.CustomResourceDefinitionStatus{AcceptedNames: out.Spec.Names, Conditions: []apiextensionsv1.CustomResourceDefinitionCondition{
		{Type: apiextensionsv1.NamesAccepted, Status: apiextensionsv1.ConditionTrue, Reason: "NoConflicts", Message: "no conflicts found", LastTransitionTime: now},
		{Type: apiextensionsv1.Established, Status: apiextensionsv1.ConditionTrue, Reason: "InitialNamesAccepted", Message: "the initial names have been accepted", LastTransitionTime: now},
	}}
	for _, v := range out.Spec.Versions {
		if v.Storage {
			out.Status.StoredVersions = []string{v.Name}
		}
	}
	return out
}
