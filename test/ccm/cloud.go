package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	cloudprovider "k8s.io/cloud-provider"
	"sigs.k8s.io/yaml"
)

const providerName = "file"

// cloud contains the instances of its configuration file.
type cloud struct {
	Instances []instance `json:"instances"`
}

type instance struct {
	Name       string               `json:"name"`
	ProviderID string               `json:"providerID"`
	Type       string               `json:"type"`
	Zone       string               `json:"zone"`
	Region     string               `json:"region"`
	Addresses  []corev1.NodeAddress `json:"addresses"`
}

func newCloud(file io.Reader) (cloudprovider.Interface, error) {
	if file == nil {
		return nil, errors.New("--cloud-config is required: it lists the instances")
	}
	data, err := io.ReadAll(file)
	if err != nil {
		return nil, err
	}
	c := &fileCloud{}
	return c, yaml.UnmarshalStrict(data, &c.cloud)
}

// fileCloud only has instances.
type fileCloud struct{ cloud cloud }

func (*fileCloud) Initialize(cloudprovider.ControllerClientBuilder, <-chan struct{}) {}
func (*fileCloud) LoadBalancer() (cloudprovider.LoadBalancer, bool)                  { return nil, false }
func (*fileCloud) Instances() (cloudprovider.Instances, bool)                        { return nil, false }
func (c *fileCloud) InstancesV2() (cloudprovider.InstancesV2, bool)                  { return &c.cloud, true }
func (*fileCloud) Zones() (cloudprovider.Zones, bool)                                { return nil, false }
func (*fileCloud) Clusters() (cloudprovider.Clusters, bool)                          { return nil, false }
func (*fileCloud) Routes() (cloudprovider.Routes, bool)                              { return nil, false }
func (*fileCloud) ProviderName() string                                              { return providerName }
func (*fileCloud) HasClusterID() bool                                                { return true }

// find identifies an instance by its provider id alone. The kubelet registers the Node with it.
func (c *cloud) find(node *corev1.Node) *instance {
	for i := range c.Instances {
		if c.Instances[i].ProviderID == node.Spec.ProviderID {
			return &c.Instances[i]
		}
	}
	return nil
}

// InstanceExists implements cloudprovider.InstancesV2.
func (c *cloud) InstanceExists(_ context.Context, node *corev1.Node) (bool, error) {
	return c.find(node) != nil, nil
}

// InstanceShutdown implements cloudprovider.InstancesV2.
func (*cloud) InstanceShutdown(context.Context, *corev1.Node) (bool, error) { return false, nil }

// InstanceMetadata implements cloudprovider.InstancesV2.
func (c *cloud) InstanceMetadata(_ context.Context, node *corev1.Node) (*cloudprovider.InstanceMetadata, error) {
	found := c.find(node)
	if found == nil {
		return nil, fmt.Errorf("the Node %s has the provider id %q, but no instance has this id", node.Name, node.Spec.ProviderID)
	}
	return &cloudprovider.InstanceMetadata{
		ProviderID: found.ProviderID, InstanceType: found.Type, Zone: found.Zone, Region: found.Region, NodeAddresses: found.Addresses,
	}, nil
}
